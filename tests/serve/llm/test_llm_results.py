"""The Python API on token ids: forms of prompts, parameters and options, what is refused, and what a result
holds."""

import re
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from cases.requests import GREEDY, IDS, PARAMS, PROMPTS, SEEDED, SIZES, exact, tokens
from cases.weights import logits
from scipy.special import log_softmax

from duetto import LLM, LLMEngine, SamplingParams
from duetto.checkpoints.huggingface import save_hf
from duetto.sampling.params import RequestOutputKind
from duetto.serve.options.keywords import options_from_keywords

pytestmark = pytest.mark.usefixtures("nothing_is_left")

# ---------------------------------------------------------------- prompts and parameters

FORMS: dict[str, Any] = {
    "list": IDS,
    "tuple": tuple(IDS),
    "numpy": np.array(IDS),
    "numpy int32": np.array(IDS, np.int32),
    "list of numpy integers": list(np.array(IDS)),
    "dict": {"prompt_token_ids": IDS},
    "dict of numpy": {"prompt_token_ids": np.array(IDS)},
    "dict with its text": {"prompt": "a text", "prompt_token_ids": IDS},
}


@pytest.mark.parametrize("prompt", FORMS.values(), ids=FORMS)
def test_prompt_forms(llm, prompt):
    want = tokens(llm.generate([IDS], GREEDY, use_tqdm=False))
    alone = llm.generate(prompt, GREEDY, use_tqdm=False)
    several = llm.generate([prompt, prompt], GREEDY, use_tqdm=False)
    assert tokens(alone) == want and tokens(several) == want * 2
    assert all(o.prompt_token_ids == IDS and o.finished for o in [*alone, *several])
    assert [type(t) for t in alone[0].prompt_token_ids] == [int] * len(IDS)
    assert alone[0].prompt == ("a text" if isinstance(prompt, dict) and "prompt" in prompt else None)


def test_rows_of_an_array_are_prompts_and_nothing_gives_nothing(llm):
    rows = np.array([[5, 6, 7], [8, 9, 10]])
    assert tokens(llm.generate(rows, GREEDY)) == tokens(llm.generate(rows.tolist(), GREEDY))
    assert llm.generate([]) == []


REFUSED: list[tuple[Any, type[Exception], str]] = [
    ("a text", ValueError, "no tokenizer"),
    ({"prompt": "a text"}, ValueError, "no tokenizer"),
    (5, TypeError, "a prompt is .* not 5"),
    (None, TypeError, "a prompt is .* not None"),
    (b"abc", TypeError, "not b'abc'"),
    ([1.5, 2.0], TypeError, r"not \[1.5, 2.0\]"),
    ([True], TypeError, "True"),
    ([IDS, [None]], TypeError, "None"),
    (np.array([1.0]), TypeError, "array"),
    ({"prompt_token_ids": "abc"}, TypeError, "abc"),
    ({"prompt_token_ids": None}, TypeError, "None"),
    ({"prompt": 3}, TypeError, "prompt must be a string, not 3"),
    ({"text": "x"}, TypeError, "text"),
    ({"prompt_token_ids": IDS, "multi_modal_data": 1}, TypeError, "multi_modal_data"),
    ([[]], ValueError, "empty"),
    ([IDS, [300]], ValueError, "300 is outside the vocabulary of 300"),
    ([-1], ValueError, "-1 is outside"),
    ([1] * 256, ValueError, "256 tokens, at most 255"),
]


@pytest.mark.parametrize(("prompt", "error", "message"), REFUSED)
def test_wrong_prompts_are_refused_before_anything_runs(llm, prompt, error, message):
    done = llm.report()["requests"]
    with pytest.raises(error, match=message):
        llm.generate(prompt, GREEDY)
    assert llm.report()["requests"] == done
    with pytest.raises((TypeError, ValueError)):
        llm.stream(prompt, GREEDY)


def test_one_set_of_parameters_or_one_for_each(llm, expected):
    assert exact(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
    alone = [llm.generate(p, s, use_tqdm=False)[0] for p, s in zip(PROMPTS, PARAMS, strict=True)]
    assert exact(alone) == expected
    for wrong, error in (([GREEDY], ValueError), ({"temperature": 0}, TypeError), (["x", "y"], TypeError)):
        with pytest.raises(error, match="sampling"):
            llm.generate(PROMPTS[:2], wrong)
    for wrong, message in (
        (SamplingParams(stop_token_ids=[300]), "stop_token_ids=300"),
        (SamplingParams(logit_bias={999: 1.0}), "logit_bias=999"),
        (SamplingParams(stop="x"), "stop=.* needs a tokenizer"),
        (SamplingParams(bad_words=["x"]), "bad_words=.* needs a tokenizer"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.generate(IDS, wrong)


def test_several_completions_are_those_of_the_following_seeds(llm):
    several = llm.generate([IDS, [9, 8]], replace(SEEDED, n=3), use_tqdm=False)
    assert [[c.index for c in o.outputs] for o in several] == [[0, 1, 2]] * 2
    for prompt, output in zip([IDS, [9, 8]], several, strict=True):
        alone = [llm.generate(prompt, replace(SEEDED, seed=7 + i), use_tqdm=False)[0] for i in range(3)]
        assert exact([output]) == exact(alone)
        assert len({tuple(c.token_ids) for c in output.outputs}) == 3


def test_each_completion_may_have_a_seed_of_its_own(llm):
    seeds = [2**40 + 1, 3, 7, 3]
    several = llm.generate([IDS, [9, 8]], replace(SEEDED, n=4, seed=seeds), use_tqdm=False)
    for prompt, output in zip([IDS, [9, 8]], several, strict=True):
        alone = [llm.generate(prompt, replace(SEEDED, seed=seed), use_tqdm=False)[0] for seed in seeds]
        assert exact([output]) == exact(alone)
        assert len({tuple(c.token_ids) for c in output.outputs}) == 3
    params = replace(SEEDED, n=2, seed=[1, 2])
    params.n = 3
    with pytest.raises(ValueError, match=re.escape("seed=(1, 2) is not allowed: one seed, or a list of as")):
        llm.generate(IDS, params)


def test_requests_without_a_seed_follow_the_engines(start):
    drawn = SamplingParams(temperature=1.0, max_tokens=10)
    with start(seed=4) as one, start(seed=4) as two:
        first, again = (tokens(llm.generate([IDS, IDS], drawn, use_tqdm=False)) for llm in (one, two))
    assert first == again and first[0] != first[1]


def test_options_and_their_other_names():
    vllm = {
        "max_num_batched_tokens": 64,
        "block_size": 32,
        "tensor_parallel_size": 1,
        "trust_remote_code": True,
    }
    options = options_from_keywords(
        {**vllm, "enforce_eager": True, "quantization": None, "max_num_seqs": 4, "seed": 3}
    )
    assert (options.max_prefill_tokens, options.page_size, options.max_num_seqs, options.seed) == (
        64,
        32,
        4,
        3,
    )


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"max_num_seq": 4}, TypeError, "unknown option 'max_num_seq', did you mean 'max_num_seqs'"),
        ({"max_num_seqs": 0}, ValueError, "max_num_seqs 0 is not allowed"),
        ({"max_output_length": 0}, ValueError, "max_output_length 0 is not allowed"),
        ({"max_num_seqs": "8"}, TypeError, "max_num_seqs='8': expected `int | null`"),
        ({"max_model_len": 1.5}, TypeError, "max_model_len=1.5"),
        ({"reproducible": "no"}, TypeError, "reproducible='no': expected `bool`"),
        ({"gpu_memory_utilization": 1.5}, ValueError, "gpu_memory_utilization 1.5"),
        ({"tensor_parallel_size": 2}, ValueError, "tensor_parallel_size 2 is not allowed"),
        ({"quantization": "awq"}, ValueError, "quantization='awq'"),
        ({"page_size": 16, "block_size": 16}, TypeError, "page_size is given under two names"),
        ({"page_size": 48}, ValueError, "page_size 48"),
        ({"max_model_len": 4096}, ValueError, "max_model_len 4096 is beyond the model's 512"),
        ({"max_batched_token_mem": 64}, ValueError, "max_model_len 256 does not fit"),
    ],
)
def test_wrong_options_are_errors_that_name_them(start, tiny, option, error, message):
    with pytest.raises(error, match=message):
        if "block_size" in option:
            LLM.from_params(tiny.config, tiny.params, **option)
        start(**option)


# ---------------------------------------------------------------- ends, log-probabilities, scores


def test_lengths_end_a_request(llm, start):
    assert [len(t) for t in tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False))] == [10, 10, 10, 3]
    (whole,) = llm.generate(IDS, replace(GREEDY, max_tokens=None, seed=1), use_tqdm=False)
    assert len(whole.outputs[0].token_ids) == 256 - len(IDS) and whole.outputs[0].finish_reason == "length"
    with start(max_input_length=5, max_output_length=4) as short:
        assert tokens(short.generate(IDS, GREEDY)) == [whole.outputs[0].token_ids[:4]]
        with pytest.raises(ValueError, match="6 tokens, at most 5"):
            short.generate([*IDS, 1], GREEDY)


def test_stop_token_ids(llm):
    (plain,) = tokens(llm.generate(IDS, GREEDY, use_tqdm=False))
    stop = next(t for i, t in enumerate(plain) if i > 1 and t not in plain[:i])
    (output,) = llm.generate(IDS, replace(GREEDY, stop_token_ids=[stop, 299]), use_tqdm=False)
    (completion,) = output.outputs
    assert completion.token_ids == plain[: plain.index(stop) + 1]
    assert (completion.finish_reason, completion.stop_reason, completion.finished()) == ("stop", stop, True)
    late = replace(GREEDY, stop_token_ids=[plain[0]], min_tokens=4)
    (first,) = tokens(llm.generate(IDS, late, use_tqdm=False))
    assert len(first) >= 4 and plain[0] not in first[:4]


def cacheless_logprobs(model, ids: list[int]) -> np.ndarray:
    """Natural log-probabilities [T,V] of what follows each of the ids."""
    padded = np.zeros((1, 256), np.int32)
    padded[0, : len(ids)] = ids
    return log_softmax(np.asarray(logits(model.params, model.config, padded))[0, : len(ids)], axis=-1)


def test_logprobs(llm, tiny):
    (output,) = llm.generate(IDS, replace(GREEDY, logprobs=4, prompt_logprobs=3), use_tqdm=False)
    (completion,) = output.outputs
    plain = cacheless_logprobs(tiny, IDS + completion.token_ids)
    assert [next(iter(at)) for at in completion.logprobs] == completion.token_ids
    for place, at in enumerate(completion.logprobs, len(IDS) - 1):
        assert list(at) == np.argsort(-plain[place])[:4].tolist()
        assert [x.rank for x in at.values()] == [1, 2, 3, 4] and at[next(iter(at))].decoded_token is None
        np.testing.assert_allclose([x.logprob for x in at.values()], plain[place][list(at)], atol=1e-4)
    chosen = [at[t].logprob for t, at in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(chosen))
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(IDS)
    for place, (token, at) in enumerate(zip(IDS[1:], output.prompt_logprobs[1:], strict=True)):
        assert next(iter(at)) == token and len(at) in (3, 4)
        assert at[token].rank == 1 + int(np.sum(plain[place] > plain[place][token]))
        np.testing.assert_allclose([x.logprob for x in at.values()], plain[place][list(at)], atol=1e-4)


def test_logprobs_only_where_wanted(llm):
    none, zero = (llm.generate(IDS, replace(GREEDY, logprobs=k), use_tqdm=False)[0] for k in (None, 0))
    assert none.outputs[0].logprobs is None and none.outputs[0].cumulative_logprob is None
    assert none.prompt_logprobs is None
    assert [list(at) for at in zero.outputs[0].logprobs] == [[t] for t in zero.outputs[0].token_ids]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_arrays_have_the_bits_of_the_lists(llm, kind):
    params = replace(SEEDED, n=2, output_kind=kind)
    (whole,) = llm.generate(IDS, params, use_tqdm=False)
    engine, pieces = LLMEngine(llm), [*whole.outputs, *llm.stream(IDS, params)]
    engine.add_request("a", IDS, params)
    while engine.has_unfinished_requests():
        pieces += [piece for output in engine.step() for piece in output.outputs]
    for piece in pieces:
        scores = [at[t].logprob for t, at in zip(piece.token_ids, piece.logprobs, strict=True)]
        assert piece.logprob_array.dtype == np.float32 and piece.token_array.dtype == np.int32
        assert piece.logprob_array.tolist() == scores and piece.token_array.tolist() == piece.token_ids
    assert [len(completion.logprob_array) for completion in whole.outputs] == [SEEDED.max_tokens] * 2
    (plain,) = llm.generate(IDS, GREEDY, use_tqdm=False)[0].outputs
    assert plain.logprob_array is None and plain.token_array.tolist() == plain.token_ids


def test_scores(llm, tiny):
    whole = PROMPTS[3]
    plain = cacheless_logprobs(tiny, whole)
    wanted = [plain[i - 1][t] for i, t in enumerate(whole)][1:]
    short, long = llm.log_likelihood([IDS, whole])
    assert long.token_ids == whole[1:] and len(short.logprobs) == len(IDS) - 1
    np.testing.assert_allclose(long.logprobs, wanted, atol=1e-3)
    assert long.total == sum(long.logprobs)
    (entries,) = (
        o.prompt_logprobs for o in llm.generate(whole, replace(GREEDY, prompt_logprobs=0), use_tqdm=False)
    )
    assert long.logprobs == [entry[t].logprob for t, entry in zip(whole[1:], entries[1:], strict=True)]
    (end,) = llm.log_likelihood(whole[:60], whole[60:])
    assert (end.token_ids, end.logprobs) == (whole[60:], long.logprobs[59:])
    for n in (1, len(whole) - 1):  # one token alone is scored
        (one,) = llm.log_likelihood(whole[:n], whole[n : n + 1])
        assert (one.token_ids, one.logprobs) == (whole[n : n + 1], long.logprobs[n - 1 : n])
    assert [s.token_ids for s in llm.log_likelihood([IDS, IDS], [[], np.array([4, 5])])] == [[], [4, 5]]
    with pytest.raises(ValueError, match="2 prompts have 1 continuations"):
        llm.log_likelihood([IDS, IDS], [[1]])


def test_metrics_and_report(llm):
    before = llm.report()
    (output,) = llm.generate(PROMPTS[3], replace(GREEDY, ignore_eos=True), use_tqdm=False)
    m, after = output.metrics, llm.report()
    assert 0 <= m.queued <= m.ttft <= m.e2e and m.arrival > 0 and m.preemptions == 0
    assert m.tpot == pytest.approx((m.e2e - m.ttft) / 9)
    assert after["requests"] == before["requests"] + 1
    assert after["prompt_tokens"] == before["prompt_tokens"] + 80
    assert after["generated_tokens"] == before["generated_tokens"] + 10
    assert set(after["ttft"]) == {"p50", "p90", "p99"}
    (again,) = llm.generate(PROMPTS[3], GREEDY, use_tqdm=False)
    assert again.num_cached_tokens == 64


# ---------------------------------------------------------------- folders


def test_folder_without_tokenizer(tiny, tmp_path, expected):
    save_hf(tmp_path, tiny.config, tiny.params)
    with LLM(tmp_path, **SIZES) as llm:
        assert llm.get_tokenizer() is None
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert exact(outputs) == expected
    assert [o.outputs[0].text for o in outputs] == [""] * 4


def test_recommended_parameters_are_the_default(tiny, tmp_path):
    save_hf(tmp_path, tiny.config, tiny.params)
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.25, "top_k": 9, "eos_token_id": [3, 4]}'
    )
    with LLM(tmp_path, **SIZES) as llm:
        default = llm.get_default_sampling_params()
        assert default == SamplingParams(temperature=0.25, top_k=9)
        seeded = replace(default, seed=int(np.random.SeedSequence([0, 0]).generate_state(1)[0]))
        assert tokens(llm.generate(IDS)) == tokens(llm.generate(IDS, seeded))
        for eos in (3, 4):
            (ended,) = llm.generate(IDS, SamplingParams(logit_bias={eos: 100.0}), use_tqdm=False)
            assert (ended.outputs[0].token_ids, ended.outputs[0].finish_reason) == ([eos], "stop")
            assert ended.outputs[0].stop_reason is None


def test_parameters_on_the_host_are_refused(tiny, llm):
    """They would be copied to the device in every step."""
    host = jax.tree.map(np.asarray, tiny.params)
    with pytest.raises(TypeError, match="parameter embed is a ndarray"):
        LLM.from_params(tiny.config, host)
    with pytest.raises(TypeError, match=r"use jax\.device_put"):
        llm.update_params(host)
