"""No feature changes the tokens: every way to serve a request gives the same bits, and the tokens of the cacheless oracle."""

import numpy as np
import pytest

from duetto import LLM, RequestOutput, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=3)
SEEDED = SamplingParams(temperature=0.9, top_k=50, top_p=0.95, seed=11, max_tokens=24, logprobs=3)
PENALISED = SamplingParams(
    temperature=0.8,
    min_p=0.01,
    seed=5,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    repetition_penalty=1.2,
    max_tokens=24,
    logprobs=3,
)
BIASED = SamplingParams(
    temperature=0.7, seed=2**40 + 1, logit_bias={5: 2.0, 9: -3.0}, max_tokens=24, logprobs=3
)
PARAMS = [GREEDY, SEEDED, PENALISED, BIASED, GREEDY, SEEDED, PENALISED]
LENGTHS = [1, 5, 63, 64, 65, 130, 200]

BASE = {
    "max_num_seqs": 8,
    "max_prefill_tokens": 128,
    "max_model_len": 256,
    "page_size": 64,
    "decode_steps": 4,
}
VARIANTS = {
    "pages of 16 tokens, more seats": {"page_size": 16, "max_num_seqs": 16},
    "pages of 128 tokens, one step a dispatch": {"page_size": 128, "decode_steps": 1},
    "pages of 256 tokens, whole prompts": {"page_size": 256, "max_prefill_tokens": 256},
    "chunks of 64 tokens, two seats": {"max_prefill_tokens": 64, "max_num_seqs": 2},
    "a cache so small that requests are preempted": {"max_batched_token_mem": 320, "page_size": 16},
    "no prefix caching, shorter model length": {"enable_prefix_caching": False, "max_model_len": 230},
}


def prompts(vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, vocab_size, n).tolist() for n in LENGTHS]


def bits(output: RequestOutput) -> list[tuple[int, bytes, tuple[int, ...]]]:
    """A request's tokens with the bits of every log-probability that it reports."""
    completion = output.outputs[0]
    assert completion.logprobs is not None
    steps = zip(completion.token_ids, completion.logprobs, strict=True)
    return [(t, np.array([x.logprob for x in at.values()]).tobytes(), tuple(at)) for t, at in steps]


@pytest.fixture(scope="module")
def serve(model):
    return lambda **options: LLM.from_params(model.config, model.params, **(BASE | options))


@pytest.fixture(scope="module")
def base(serve):
    with serve() as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(base, model):
    """Each request served alone by an engine that has seen nothing before."""
    outputs = []
    for prompt, params in zip(prompts(model.config.vocab_size), PARAMS, strict=True):
        base._engine.pool.forget()
        outputs += [bits(o) for o in base.generate(prompt, params, use_tqdm=False)]
    return outputs


def test_alone_equals_oracle(model, expected, oracle):
    plain = oracle(model)
    for prompt, params, found in zip(prompts(model.config.vocab_size), PARAMS, expected, strict=True):
        assert [token for token, *_ in found] == plain(prompt, params)


def test_batched_and_prefix_hits_equal_alone(model, base, expected):
    texts = prompts(model.config.vocab_size)
    base._engine.pool.forget()
    cold = base.generate(texts, PARAMS, use_tqdm=False)
    warm = base.generate(texts, PARAMS, use_tqdm=False)
    assert [bits(o) for o in cold] == expected
    assert [bits(o) for o in warm] == expected
    assert sum(o.num_cached_tokens for o in cold) == 0
    assert [o.num_cached_tokens for o in warm] == [(n - 1) // 64 * 64 for n in LENGTHS]


def test_any_order_of_arrival(model, base, expected):
    texts, order = prompts(model.config.vocab_size), [4, 0, 6, 2, 5, 1, 3]
    for place, i in enumerate(order):
        base.add_request(texts[i], PARAMS[i], request_id=str(i), priority=place % 3)
        base.step()
    found = {}
    while base.has_unfinished_requests():
        found |= {o.request_id: bits(o) for o in base.step()}
    assert [found[str(i)] for i in range(len(order))] == expected


def test_streamed_equals_batch(model, base, expected):
    for prompt, params, want in zip(prompts(model.config.vocab_size), PARAMS, expected, strict=True):
        pieces = list(base.stream(prompt, params))
        assert [t for piece in pieces for t in piece.token_ids] == [token for token, *_ in want]
        assert pieces[-1].finish_reason == "length"


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_any_engine_gives_the_same_bits(model, serve, expected, options):
    with serve(**options) as llm:
        found = llm.generate(prompts(model.config.vocab_size), PARAMS, use_tqdm=False)
        report = llm.report()
    assert [bits(o) for o in found] == expected
    assert report["compilations"] == 0
    if "max_batched_token_mem" in options:
        assert report["preemptions"] > 0


def test_prompt_logprobs_do_not_depend_on_chunks(model, base, serve, expected):
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2)
    text = prompts(model.config.vocab_size)[-1]

    def scores(llm: LLM) -> list[tuple]:
        entries = llm.generate(text, params, use_tqdm=False)[0].prompt_logprobs
        assert entries is not None and entries[0] is None and len(entries) == len(text)
        return [tuple((t, x.logprob, x.rank) for t, x in entry.items()) for entry in entries[1:] if entry]

    with serve(max_prefill_tokens=64) as small:
        assert scores(base) == scores(small)


def test_samples_of_one_prompt_share_its_pages(model, base):
    """All of them are queued at once on a cold cache; the first writes the prompt's pages, the others find them."""
    base._engine.pool.forget()
    before = base.report()["cached_tokens"]
    params = SamplingParams(temperature=0.8, seed=4, n=4, max_tokens=4, logprobs=0)
    text = prompts(model.config.vocab_size)[5]
    several = base.generate(text, params, use_tqdm=False)[0]
    assert base.report()["cached_tokens"] - before == 3 * 128
    for i, completion in enumerate(several.outputs):
        alone = SamplingParams(temperature=0.8, seed=4 + i, max_tokens=4, logprobs=0)
        base._engine.pool.forget()
        assert bits(base.generate(text, alone, use_tqdm=False)[0]) == bits(
            RequestOutput("", None, [], [completion])
        )
