"""No feature changes the tokens: every way to serve a request gives the same bits, and the tokens of the
cacheless oracle."""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from cases.embeddings import embedded, embedded_plainly
from cases.invariance import LENGTHS, PARAMS, SEEDED, bits, prompts
from cases.models import RANDOM
from cases.observed import OPTIONS, observed, observed_plainly
from cases.oracle import computed
from cases.streams import streamed
from suite.fixtures import EXPERTS_IN_CODES, Model, mark_models, with_few_shapes
from suite.marks import full, full_if

from duetto import LLM, RequestOutput, SamplingParams
from duetto.cpu_kernels.library import load_library
from duetto.model.recurrent.kinds import STATE_WINDOW
from duetto.model.tree import has_instance
from duetto.model.weights.device_forms import restore_params
from duetto.model.weights.fixed_tiles import FixedTiled
from duetto.serve.engine.core.request import Request
from duetto.serve.engine.speculation.ngram import NgramDrafter
from duetto.serve.engine.speculation.suffix import SuffixDrafter
from duetto.serve.runtime.compiled.program_table import ProgramTable
from duetto.serve.runtime.compiled.shapes import CanonicalShapes

CHUNKS = {"max_prefill_tokens": 32, "max_num_seqs": 16, "page_size": 128, "decode_steps": 1}
# Each option has another value somewhere, and no more programs than that takes: only the base has prefills of
# several rows.
TIGHT = {  # so few pages that requests are preempted
    "max_batched_token_mem": 320, "page_size": 16, "max_prefill_tokens": 32, "batch_invariant_matmul": True,
    "decode_steps": 4,
}  # fmt: skip
SEVERAL = CHUNKS | {"decode_steps": 4}
FEWER = {  # of models whose layers have both in another; what is their own is shown by this one
    **dict.fromkeys(
        ("int8", "int8 activations", "int4, int8 activations", EXPERTS_IN_CODES), CHUNKS
    ),  # sixteen rows
    "windows": TIGHT,
    "longrope": TIGHT,  # keys of prompts that became longer before they are computed again
    "windows, int8 cache": SEVERAL,
    **dict.fromkeys(("parallel", "recurrent", "borrowed", "distances", "gates"), TIGHT),
    "latent": SEVERAL,
    "bfloat16": TIGHT,  # with tiles of their own
    "demo": CHUNKS,  # programs as users have them
}
MORE = {  # of a small model: the demo model has optimised programs in engines enough
    "pages of 256 tokens, whole prompts, two seats, no prefix caching, shorter model length": {
        "page_size": 256, "max_prefill_tokens": 256, "prefill_buckets": (64, 256), "decode_steps": 1,
        "max_num_seqs": 2, "enable_prefix_caching": False, "max_model_len": 230,
    },
}  # fmt: skip
CODED = "int8", "int8 activations", "int4, int8 activations", EXPERTS_IN_CODES, "latent, fp8_e5m2 cache"
BY_KERNELS = "windows", "bfloat16", "int8", EXPERTS_IN_CODES
Scores = tuple[tuple[int, float, int | None], ...]  # of a token and those likeliest beside it


def prompt_bits(output: RequestOutput) -> list[Scores]:
    """Scores of a prompt's tokens after its first."""
    entries = output.prompt_logprobs
    assert entries is not None and entries[0] is None and len(entries) == len(output.prompt_token_ids)
    return [tuple((t, x.logprob, x.rank) for t, x in entry.items()) for entry in entries[1:] if entry]


@pytest.mark.parametrize(
    "model",
    [*mark_models(RANDOM), "windows, int8 cache", *map(full, CODED), full("demo")],
    indirect=True,
    scope="session",
)
def test_alone_equals_oracle(model, expected, oracle):
    """Not in bfloat16, where the oracle's sums are rounded elsewhere."""
    plain = oracle(model)
    for prompt, params, found in zip(prompts(model.config.vocab_size), PARAMS, expected, strict=True):
        tokens = [token for token, *_ in found]
        assert tokens == plain(prompt, params, guess=tokens)


def test_a_guess_changes_no_token_of_the_oracle(tiny):
    text = prompts(tiny.config.vocab_size)[1]
    right = computed(tiny, text, SEEDED)
    wrong = [*right[:5], right[5] ^ 1, *right[6:]]
    assert computed(tiny, text, SEEDED, guess=wrong) == computed(tiny, text, SEEDED, guess=right) == right


def test_batched_and_prefix_hits_equal_alone(model, base, expected):
    texts = prompts(model.config.vocab_size)
    base.engine.tables.reset_prefix_cache()
    cold = base.generate(texts, PARAMS, use_tqdm=False)
    warm = base.generate(texts, PARAMS, use_tqdm=False)
    assert [bits(o) for o in cold] == expected
    assert [bits(o) for o in warm] == expected
    assert sum(o.num_cached_tokens for o in cold) == 0
    assert [o.num_cached_tokens for o in warm] == [(n - 1) // 64 * 64 for n in LENGTHS]
    shared = {str(shape) for shape in base.engine.classes.prefill if shape.rows > 1}
    assert bool(shared & set(base.report()["steps"])) == bool(shared)


@pytest.mark.parametrize("model", ["tiny", full("recurrent")], indirect=True, scope="session")
def test_requests_with_cache_salts_equal_alone(model, base, expected):
    """Beside those of other salts, that compute the same pages."""
    texts = [
        {"prompt_token_ids": text, "cache_salt": salt}
        for salt in ("a", "b")
        for text in prompts(model.config.vocab_size)
    ]
    for cached in (0, sum((n - 1) // 64 * 64 for n in LENGTHS)):
        found = base.generate(texts, 2 * PARAMS, use_tqdm=False)
        assert [bits(o) for o in found] == 2 * expected
        assert sum(o.num_cached_tokens for o in found) == 2 * cached


# Of each kind of attention and of cache: what joins late is compared with no regard to the rest of a model.
@pytest.mark.parametrize(
    "model",
    [full("latent"), full("recurrent"), full("bfloat16"), full("windows, int8 cache"), "tiny"],
    indirect=True,
    scope="session",
)
@pytest.mark.usefixtures("early")
def test_cold_equals_alone(model, serve, expected, monkeypatch):
    """By the first programs, and while the others join between the steps."""
    texts, rounds, gate, add = prompts(model.config.vocab_size), 0, threading.Event(), ProgramTable.add
    monkeypatch.setattr(ProgramTable, "add", lambda *given: gate.wait() and add(*given))
    with serve() as llm, ExitStack() as last:
        last.callback(gate.set)
        while rounds < 2 or llm.engine.warmup is not None:
            rounds += llm.engine.warmup is None
            llm.engine.tables.reset_prefix_cache()
            assert [bits(o) for o in llm.generate(texts, PARAMS, use_tqdm=False)] == expected
            gate.set()


def test_any_order_of_arrival(model, base, expected):
    texts, order = prompts(model.config.vocab_size), [4, 0, 6, 2, 5, 1, 3]
    for place, i in enumerate(order):
        base.add_request(texts[i], PARAMS[i], request_id=str(i), priority=place % 3)
        base.step()
    found = {}
    while base.has_unfinished_requests():
        found |= {o.request_id: bits(o) for o in base.step()}
    assert [found[str(i)] for i in range(len(order))] == expected


@full_if(lambda model: model != "tiny")
def test_streamed_equals_batch(model, base, expected):
    for prompt, params, want in zip(prompts(model.config.vocab_size), PARAMS, expected, strict=True):
        pieces = list(base.stream(prompt, params))
        assert [t for piece in pieces for t in piece.token_ids] == [token for token, *_ in want]
        assert pieces[-1].finish_reason == "length"


@full_if(lambda model: model != "tiny")
def test_streams_of_the_server_equal_alone(model, base, expected):
    """Beside each other, and again from the pages that they have left."""
    texts = prompts(model.config.vocab_size)
    base.engine.tables.reset_prefix_cache()
    assert streamed(base, texts, PARAMS) == expected
    assert streamed(base, texts, PARAMS) == expected


@pytest.fixture(scope="module")
def embeddings(model, base):
    """Of each text alone."""
    found = []
    for text in prompts(model.config.vocab_size):
        base.engine.tables.reset_prefix_cache()
        found.append(embedded(base, [text]))
    return [last for last, _ in found] + [mean for _, mean in found]


@full_if(lambda model: model != "tiny")
def test_embeddings_equal_alone(model, base, embeddings):
    """Beside each other, and again from the pages that they have left."""
    texts = prompts(model.config.vocab_size)
    base.engine.tables.reset_prefix_cache()
    assert embedded(base, texts) == embeddings
    assert embedded(base, texts) == embeddings
    if model.params.embed.dtype == "float32" and not model.name.endswith(("cache", "activations")):
        plain = embedded_plainly(model.params, model.config, texts)
        assert np.allclose(embeddings, plain, rtol=1e-3, atol=1e-4)


@full_if(lambda model: model != "tiny")
def test_delayed_prompts_have_the_same_bits(model, base, expected, monkeypatch):
    """An empty seat costs nothing here: prompts are held back as long as there is anything to save."""
    texts, asked = prompts(model.config.vocab_size), [(j % 2, 2 + 7 * j % 20) for j in range(20)]
    params = [PARAMS[i].clone() for i, _ in asked]
    for one, (_, most) in zip(params, asked, strict=True):
        one.max_tokens = most  # they end one by one
    gathering, seconds = base.engine.scheduler.prefill_delayer, {"prefill": 1.0, "decode": 1e-9}
    monkeypatch.setattr(gathering, "_costs", None)
    monkeypatch.setattr(gathering, "_seconds", lambda shape: shape.area * seconds[shape.phase])
    before = gathering.prompts
    outputs = base.generate([texts[i] for i, _ in asked], params, use_tqdm=False)
    assert [bits(o) for o in outputs] == [expected[i][:most] for i, most in asked]
    shapes = base.engine.classes.prefill
    alone = min(s.area for s in shapes if s.rows == 1)
    assert (gathering.prompts > before) == any(s.area < s.rows * alone for s in shapes)


@pytest.mark.full
def test_any_engine_gives_the_same_bits(model, serve, expected, embeddings):
    for options in variants(model):
        report = assert_same_bits(model, serve, expected, options, embeddings)
        if "max_batched_token_mem" in options and model.config.windows == (None,):  # else pages are reserved
            assert report["preemptions"] > 0


@pytest.mark.full
@pytest.mark.parametrize("model", ["tiny"], indirect=True, scope="session")
@pytest.mark.parametrize("options", MORE.values(), ids=MORE)
def test_more_engines_give_the_same_bits(model, serve, expected, options):
    assert_same_bits(model, serve, expected, options)


@pytest.mark.full
@pytest.mark.parametrize("model", ["windows"], indirect=True, scope="session")
def test_the_shapes_of_an_accelerator_give_the_same_tokens(model, serve, expected, monkeypatch):
    """Their canonical shapes are wide: the tokens are the oracle's, and whoever is beside a request changes
    no bit of it."""
    here = CanonicalShapes.choose
    monkeypatch.setattr(CanonicalShapes, "choose", lambda platform, *sizes: here("gpu", *sizes))
    texts = prompts(model.config.vocab_size)
    with serve(max_num_seqs=32, max_prefill_tokens=256, decode_steps=4) as llm:
        assert {str(shape) for shape in llm.engine.classes.decode} >= {"decode[64,1]", "decode[64,4]"}
        assert min(shape.area for shape in llm.engine.programs.steps if shape.phase == "prefill") == 256
        together = [bits(o) for o in llm.generate(texts, PARAMS, use_tqdm=False)]
        llm.engine.tables.reset_prefix_cache()
        alone = [bits(llm.generate(t, p, use_tqdm=False)[0]) for t, p in zip(texts, PARAMS, strict=True)]
    assert together == alone
    assert [[token for token, *_ in x] for x in together] == [[token for token, *_ in x] for x in expected]


@pytest.mark.parametrize("model", ["tiny", *map(full, BY_KERNELS)], indirect=True, scope="session")
@pytest.mark.skipif(not load_library().isas, reason=load_library().refusal or "there are kernels")
def test_own_kernels_of_a_cpu_give_the_same_bits(model, serve, oracle):
    """The tokens are those of the oracle with the same kernels, but in bfloat16."""
    texts = prompts(model.config.vocab_size)
    with serve(cpu_kernels=True) as llm:
        together = [bits(o) for o in llm.generate(texts, PARAMS, use_tqdm=False)]
        llm.engine.tables.reset_prefix_cache()
        alone = [bits(llm.generate(t, p, use_tqdm=False)[0]) for t, p in zip(texts, PARAMS, strict=True)]
        assert (
            llm.report()["cpu_kernels"] == load_library().isa and llm.report()["without_cpu_kernels"] is None
        )
        assert llm.report()["compilations"] == 0
        plain = oracle(replace(model, params=llm.engine.params))
        llm.update_params(model.params)
        assert jax.tree.structure(llm.params) == jax.tree.structure(restore_params(model.params))
    assert together == alone
    if model.name != "bfloat16":
        wanted = [plain(text, params) for text, params in zip(texts, PARAMS, strict=True)]
        assert [[token for token, *_ in x] for x in together] == wanted


@pytest.mark.full
@pytest.mark.parametrize("model", ["demo", "borrowed"], indirect=True, scope="session")
@pytest.mark.skipif(not load_library().isas, reason=load_library().refusal or "there are kernels")
def test_attention_by_kernels_of_a_cpu_gives_the_same_bits(model, serve, oracle):
    """Alone, beside others, in other chunks and pages, through preemption, and with draft tokens. An engine
    of the demo model, whose programs are optimised, has several of these. The first has programs of all
    widths, the others those that serve every request. By default a request that is alone takes several steps
    in a dispatch, and many take one; of programs that are not optimised, those of one row have other bits."""
    texts = prompts(model.config.vocab_size)
    with serve(cpu_kernels=True, decode_steps=None) as llm:
        assert llm.report()["cpu_attention_layers"] > 0
        plain = oracle(replace(model, params=llm.engine.params))
        alone = [bits(llm.generate(t, p, use_tqdm=False)[0]) for t, p in zip(texts, PARAMS, strict=True)]
        llm.engine.tables.reset_prefix_cache()
        assert [bits(o) for o in llm.generate(texts, PARAMS, use_tqdm=False)] == alone
        used = {"decode[8,1]"} if model.name == "borrowed" else {"decode[1,4]", "decode[8,1]"}
        assert used <= llm.report()["steps"].keys()
    wanted = [plain(text, params) for text, params in zip(texts, PARAMS, strict=True)]
    assert [[token for token, *_ in x] for x in alone] == wanted
    drafts = {"method": "ngram", "num_speculative_tokens": 7, "adaptive": False}
    speculating = {"speculative_config": drafts, "decode_steps": 1}
    together, apart = [TIGHT, CHUNKS | speculating], [TIGHT, CHUNKS, speculating]
    for options in together if model.name == "demo" else apart:
        with with_few_shapes(verifications=1):
            llm = serve(**options, cpu_kernels=True)
        with llm:
            assert [bits(o) for o in llm.generate(texts, PARAMS, use_tqdm=False)] == alone
            if "max_batched_token_mem" in options and model.config.windows == (None,):
                assert llm.report()["preemptions"] > 0


def variants(model: Model) -> list[dict[str, Any]]:
    return [FEWER[model.name]] if model.name in FEWER else [TIGHT, CHUNKS]


def assert_same_bits(model: Model, serve, expected, options, embeddings=None) -> dict[str, Any]:
    with serve(**options) as llm:
        texts = prompts(model.config.vocab_size)
        found = llm.generate(texts, PARAMS, use_tqdm=False)
        assert embeddings is None or embedded(llm, texts) == embeddings
        report = llm.report()
        llm.update_params(model.params)
        is_wrapped = has_instance(llm.engine.params, FixedTiled)
        assert jax.tree.structure(llm.params) == jax.tree.structure(restore_params(model.params))
    assert is_wrapped == ("batch_invariant_matmul" in options and model.params.embed.dtype == "bfloat16")
    assert [bits(o) for o in found] == expected
    assert report["compilations"] == 0
    return report


@full_if(lambda model: model != "tiny")
def test_prompt_logprobs_do_not_depend_on_chunks(model, base, serve, expected):
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2)
    text = prompts(model.config.vocab_size)[-1]

    def scores(llm: LLM, neighbours: int = 0) -> list[Scores]:
        texts = [text[:n] for n in (5, 70)[:neighbours]]
        output = llm.generate([*texts, text], params, use_tqdm=False)[-1]
        assert output.num_cached_tokens == 0  # all of its tokens are scored
        return prompt_bits(output)

    base.engine.tables.reset_prefix_cache()
    alone = scores(base)
    assert scores(base) == alone
    base.engine.tables.reset_prefix_cache()
    assert scores(base, neighbours=2) == alone
    before = base.report()["cached_tokens"]
    (end,) = base.log_likelihood(text[:100], text[100:])
    found = base.report()["cached_tokens"] - before
    # the page before the tokens that are scored
    assert found == 64 or STATE_WINDOW in base.engine.config.windows
    assert end.logprobs == [entry[0][1] for entry in alone[99:]]
    with with_few_shapes():
        small = serve(**variants(model)[0] | {"decode_steps": 1})
    with small:
        assert scores(small) == alone


@pytest.mark.parametrize("model", ["tiny", full("bfloat16")], indirect=True, scope="session")
def test_prompt_logprobs_survive_preemption(model, base, serve, expected):
    """So few pages that requests are preempted while they decode: they find their pages again, and have their
    scores."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, prompt_logprobs=2)
    texts = prompts(model.config.vocab_size)
    base.engine.tables.reset_prefix_cache()
    wanted = [prompt_bits(o) for o in base.generate(texts, params, use_tqdm=False)]
    with with_few_shapes():
        llm = serve(**TIGHT | {"decode_steps": 1})
    with llm:
        for _ in range(2):
            found = llm.generate(texts, params, use_tqdm=False)
            assert [prompt_bits(o) for o in found] == wanted
        assert llm.report()["preemptions"] > 0


@full_if(lambda model: model != "tiny")
def test_samples_of_one_prompt_share_its_pages(model, base):
    """All of them are queued at once on a cold cache; the first writes the prompt's pages, the others find
    them."""
    base.engine.tables.reset_prefix_cache()
    before = base.report()["cached_tokens"]
    params = SamplingParams(temperature=0.8, seed=4, n=4, max_tokens=4, logprobs=0)
    text = prompts(model.config.vocab_size)[5]
    several = base.generate(text, params, use_tqdm=False)[0]
    assert base.report()["cached_tokens"] - before == 3 * 128
    for i, completion in enumerate(several.outputs):
        alone = SamplingParams(temperature=0.8, seed=4 + i, max_tokens=4, logprobs=0)
        base.engine.tables.reset_prefix_cache()
        assert bits(base.generate(text, alone, use_tqdm=False)[0]) == bits(
            RequestOutput("", None, [], [completion])
        )


def traced(expected) -> list[SamplingParams]:
    return [SamplingParams(trace_decode_token_ids=[t for t, *_ in want], logprobs=3) for want in expected]


@pytest.mark.parametrize(
    "model", ["tiny", full("recurrent"), full("bfloat16")], indirect=True, scope="session"
)
def test_replayed_traces_have_the_scores_of_sampled_tokens(model, base, expected):
    """Beside each other, and beside requests that sample."""
    texts = prompts(model.config.vocab_size)
    found = base.generate([*texts, *texts], [*traced(expected), *PARAMS], use_tqdm=False)
    assert [bits(o) for o in found] == [*expected, *expected]


@pytest.mark.full
@pytest.mark.parametrize("model", ["windows", "borrowed"], indirect=True, scope="session")
def test_observed_values_change_no_bit(model, serve, expected):
    """Those of each request are its own: alone, beside others, in chunks, and through preemption."""
    texts, found = prompts(model.config.vocab_size), []
    for options in ({}, {**TIGHT, "batch_invariant_matmul": False}):
        with serve(**options | OPTIONS) as llm:
            together = llm.generate(texts, PARAMS, use_tqdm=False)
            alone = [llm.generate(t, p, use_tqdm=False)[0] for t, p in zip(texts, PARAMS, strict=True)]
            assert llm.report()["compilations"] == 0
        assert [bits(o) for o in together] == expected
        found += [[observed(o) for o in outputs] for outputs in (together, alone)]
    assert all(one == found[0] for one in found)
    for text, output in zip(texts, together, strict=True):
        completion = output.outputs[0]
        hidden, experts = observed_plainly(model.params, model.config, text + completion.token_ids[:-1])
        assert np.allclose(completion.hidden_states, hidden, rtol=1e-3, atol=1e-4)
        assert np.array_equal(completion.routed_experts, experts)


# ------------------------------------------------------------ speculative decoding


class Told:
    """A drafter that knows what the requests will say, and guesses what `change(place, token, V)` makes of
    it."""

    def __init__(self, texts: list[list[int]], V: int, change: Callable[[int, int, int], int]):
        self.texts, self.V, self.change = {tuple(text): text for text in texts}, V, change
        self.known: dict[Request, int] = {}

    def begin(self, request: Request, prompt: Sequence[int], salt: bytes = b"") -> None:
        self.known[request] = len(prompt)

    def extend(self, request: Request, tokens: Sequence[int]) -> None:
        self.known[request] += len(tokens)

    def propose(self, request: Request, k: int) -> list[int]:
        known, prompt = self.known[request], request.prompt
        text = next(text for text in self.texts.values() if text[: len(prompt)] == prompt)
        ahead = enumerate(text[known : known + k], known)
        return [self.change(i, token, self.V) for i, token in ahead]

    def end(self, request: Request) -> None:
        del self.known[request]


def scattered(place: int, token: int, V: int) -> int:
    return (token * 31 + place * 17) % V


CHANGES = {
    "perfect": lambda place, token, V: token,
    "wrong": lambda place, token, V: (token + 1) % V,
    "random": scattered,
    "adversarial": lambda place, token, V: token if place % 5 < 3 else scattered(place, token, V),
}
OWN = {"ngram": lambda: NgramDrafter(1, 3), "suffix": lambda: SuffixDrafter(min_token_prob=0.0)}


@pytest.fixture(scope="module")
def guessing(serve, model):
    """An engine that verifies seven guesses a row, with so small a cache that requests are preempted."""
    config = {"method": "ngram", "num_speculative_tokens": 7, "adaptive": False}
    sizes = {"max_model_len": 230, "max_batched_token_mem": 240, "page_size": 16, "max_num_seqs": 4}
    with with_few_shapes(verifications=1 if model.name == "recurrent" else None):
        llm = serve(**sizes, max_prefill_tokens=32, decode_steps=1, speculative_config=config)
    with llm:
        yield llm


@full_if(lambda model, drafter: model != "tiny" or drafter in ("random", "ngram"))
@pytest.mark.parametrize(
    "model",
    ["tiny", "windows", "latent", "borrowed", "recurrent", "bfloat16, fp8_e4m3 cache", "demo"],
    indirect=True,
    scope="session",
)
@pytest.mark.parametrize("drafter", [*CHANGES, *OWN])
def test_draft_tokens_change_no_bit(model, guessing, expected, drafter):
    """Greedy and seeded, with penalties, biases and log-probabilities; through preemption, and through prefix
    hits."""
    texts, V = prompts(model.config.vocab_size), model.config.vocab_size
    whole = [text + [token for token, *_ in want] for text, want in zip(texts, expected, strict=True)]
    speculation = guessing.engine.speculation
    speculation.drafter = Told(whole, V, CHANGES[drafter]) if drafter in CHANGES else OWN[drafter]()
    before = guessing.report()
    guessing.engine.tables.reset_prefix_cache()
    for _ in range(2):
        assert [bits(o) for o in guessing.generate(texts, PARAMS, use_tqdm=False)] == expected
    after = guessing.report()
    drafted, accepted = (
        after["speculation"][key] - before["speculation"][key] for key in ("drafted", "accepted")
    )
    assert drafted > 0 and after["compilations"] == before["compilations"]
    if drafter in ("wrong", "random") and model.config.windows == (None,):  # the others may finish in time
        assert after["preemptions"] > before["preemptions"]
    assert drafter not in ("perfect", "wrong") or accepted == (drafted if drafter == "perfect" else 0)


@pytest.mark.parametrize("model", ["tiny", "recurrent"], indirect=True, scope="session")
def test_the_rest_of_a_trace_is_drafted(model, guessing, expected):
    """Its tokens are right, so a step verifies several; a drafter is not needed."""
    texts = prompts(model.config.vocab_size)
    guessing.engine.speculation.drafter = OWN["ngram"]()
    found = guessing.generate(texts, traced(expected), use_tqdm=False)
    assert [bits(o) for o in found] == expected
    longest = max(len(one.guesses) for o in found for one in o.outputs[0].passes)
    assert longest > 1 and all(one.accepted == len(one.guesses) for o in found for one in o.outputs[0].passes)
