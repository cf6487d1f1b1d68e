"""Prompts with embeddings in the place of tokens, from the page names to the tokens of an engine."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from cases.encoders import BUCKETS, PLACEHOLDER, as_embeddings, picture, with_pair_encoder, with_table_encoder
from cases.invariance import BASE, bits
from cases.oracle import Model
from cases.waiting import until
from suite.fixtures import random_model, with_few_shapes

from duetto import LLM, SamplingParams
from duetto.model.embeddings.prompt import EmbeddingSpan, Prompt
from duetto.serve.engine.core.embedding_pool import EmbeddingPool, SpanLimits
from duetto.serve.runtime.compiled.lowering import LocalLowering
from duetto.serve.runtime.compiled.shapes import Shape, Sizes
from duetto.serve.runtime.steps.phases import TargetOnly

OPTIONS = BASE | {"page_size": 16, "decode_steps": 1}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2)
SEEDED = SamplingParams(temperature=0.9, top_k=50, seed=11, max_tokens=24, logprobs=2)
TEXTS = [np.random.default_rng(5).integers(8, 300, n).tolist() for n in (40, 150, 100, 70, 50)]
# Spans inside a page, over borders of pages and chunks, and at both ends of a prompt.
SPANS = [[(3, 9)], [(10, 50), (50, 66), (110, 150)], [(0, 48), (60, 61)], [(20, 68)], [(30, 50)]]
SHORT = [0, 3, 4]  # prompts that are admitted together where pages are few


def run(llm: LLM, prompts: Sequence[Any], params: SamplingParams = GREEDY) -> list[Any]:
    """The bits of each prompt's answer."""
    return [bits(o) for o in llm.generate(list(prompts), params, use_tqdm=False)]


def prompts_of(model: Model) -> list[Prompt]:
    return [as_embeddings(t, model.config.vocab_size, *s) for t, s in zip(TEXTS, SPANS, strict=True)]


@pytest.fixture(scope="module")
def reader(tiny) -> Model:
    return with_table_encoder(tiny)


@pytest.fixture(scope="module")
def llm(reader) -> Iterator[LLM]:
    with LLM.from_params(reader.config, reader.params, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def wanted(llm) -> list[Any]:
    """Of the texts alone."""
    return [run(llm, [text], params)[0] for text in TEXTS for params in (GREEDY, SEEDED)]


@pytest.fixture(scope="module")
def looker(tiny) -> Iterator[LLM]:
    """An engine whose pool holds one picture of the largest size."""
    model = with_pair_encoder(tiny)
    with with_few_shapes(), LLM.from_params(model.config, model.params, **OPTIONS) as llm:
        yield llm


@pytest.fixture(autouse=True)
def forgotten(request) -> None:
    for name in {"llm", "looker"} & set(request.fixturenames):
        request.getfixturevalue(name).engine.tables.reset_prefix_cache()


def encoded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[EmbeddingSpan]:
    """The spans that the engine encodes from now on."""
    spans, encode = [], llm.engine.executor.encode
    monkeypatch.setattr(
        llm.engine.executor, "encode", lambda a, span, rows: spans.append(span) or encode(a, span, rows)
    )
    return spans


def test_embeddings_of_tokens_give_the_bits_of_these_tokens(llm, reader, wanted):
    """Alone, over borders of chunks; then beside each other, and again from the pages that they have left."""
    prompts = prompts_of(reader)
    for i, params in enumerate((GREEDY, SEEDED)):
        assert [run(llm, [prompt], params)[0] for prompt in prompts] == wanted[i::2]
    llm.engine.tables.reset_prefix_cache()
    for i, params in enumerate((GREEDY, SEEDED)):
        assert run(llm, prompts, params) == wanted[i::2]
    assert llm.report()["cached_tokens"] > 0 and llm.report()["compilations"] == 0


def test_a_prefix_hit_may_end_in_a_span(llm, monkeypatch):
    """The rest of the span comes from the pool, or is encoded again."""
    spans, text = encoded(llm, monkeypatch), TEXTS[1]
    other = [*text[:55], text[55] ^ 1, *text[56:]]
    plain = run(llm, [other])
    for in_pool in (True, False):
        llm.engine.tables.reset_prefix_cache()
        llm.engine.scheduler.embedding_pool.clear()
        run(llm, [as_embeddings(text, 300, (10, 50))])
        if not in_pool:
            llm.engine.scheduler.embedding_pool.clear()
        (found,) = llm.generate(as_embeddings(other, 300, (10, 50)), GREEDY, use_tqdm=False)
        assert found.num_cached_tokens == 48 and [bits(found)] == plain
        assert len(spans) == (1 if in_pool else 3)


def test_preempted_prompts_are_encoded_again(llm, reader):
    params = SEEDED.clone()
    params.max_tokens = 60
    plain = run(llm, [TEXTS[i] for i in SHORT], params)
    with with_few_shapes():
        tight = LLM.from_params(reader.config, reader.params, **OPTIONS | {"max_batched_token_mem": 256})
    with tight:
        assert run(tight, [prompts_of(reader)[i] for i in SHORT], params) == plain
        assert tight.report()["preemptions"] > 0


@pytest.mark.usefixtures("early")
def test_a_cold_engine_has_the_same_bits(reader, wanted):
    """While other programs join the first ones."""
    with LLM.from_params(reader.config, reader.params, **OPTIONS) as cold:
        assert cold.engine.warmup is not None
        assert run(cold, prompts_of(reader)) == wanted[::2]
        until(lambda: cold.engine.warmup is None)
        cold.engine.tables.reset_prefix_cache()
        assert run(cold, prompts_of(reader)) == wanted[::2]


def test_chunks_of_states_end_where_their_blocks_do():
    """Also before a span that does not fit the pool."""
    model = with_table_encoder(random_model("recurrent"))
    text = np.random.default_rng(6).integers(8, 300, 240).tolist()
    ends = [0, 47, 94, 141, 188, 236]
    prompt = as_embeddings(text, 300, *pairwise(ends))
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2)
    with with_few_shapes():
        llm = LLM.from_params(model.config, model.params, **OPTIONS | {"max_prefill_tokens": 192})
    with llm:
        assert llm.engine.sizes.embedding_rows == 192
        plain = run(llm, [text], params)
        assert run(llm, [prompt], params) == plain


def test_sleep_and_other_weights_forget_embeddings(llm, reader, wanted, monkeypatch):
    spans = encoded(llm, monkeypatch)
    prompt = prompts_of(reader)[0]
    llm.engine.scheduler.embedding_pool.clear()
    for forget in (
        lambda: None,
        lambda: (llm.sleep(level=1), llm.wake_up()),
        lambda: llm.update_params(reader.params),
    ):
        forget()
        llm.engine.tables.reset_prefix_cache()
        assert run(llm, [prompt]) == wanted[:1]
    assert len(spans) == 3


def test_other_content_shares_no_page_and_the_same_content_does(looker, monkeypatch):
    """Under equal tokens. The content is encoded once while it is in the pool."""
    spans = encoded(looker, monkeypatch)
    tokens = [PLACEHOLDER] * 40
    one, two = (Prompt(tokens, (picture(seed, 4, 20),)) for seed in (1, 2))
    outputs = [looker.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in (one, two, one, two)]
    assert [o.num_cached_tokens for o in outputs] == [0, 0, 32, 32]
    assert bits(outputs[0]) == bits(outputs[2]) != bits(outputs[1]) == bits(outputs[3])
    moved = Prompt(tokens, (picture(1, 3, 20),))
    assert looker.generate(moved, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    plain = looker.generate([tokens], GREEDY, use_tqdm=False)[0]
    assert plain.num_cached_tokens == 0 and bits(plain) != bits(outputs[0])
    assert [span.digest for span in spans] == [one.spans[0].digest, two.spans[0].digest]


def test_prompts_wait_for_the_pool_and_all_end(looker):
    """Each has more embeddings than the pool holds, and each of its spans takes more than half of it."""
    rows = looker.engine.sizes.embedding_rows
    assert rows == 64
    count, tokens = BUCKETS[-1] // 2, [PLACEHOLDER] * 200
    prompts = [
        Prompt(tokens, tuple(picture(10 * i + j, 3 + 40 * j, count) for j in range(4))) for i in range(4)
    ]
    alone = [run(looker, [prompt])[0] for prompt in prompts]
    looker.engine.tables.reset_prefix_cache()
    assert run(looker, prompts) == alone


def test_a_content_has_the_same_bits_beside_any_other(looker):
    tokens = [PLACEHOLDER] * 60
    prompt = Prompt(tokens, (picture(1, 4, 8), picture(2, 30, 24)))
    alone = run(looker, [prompt])
    others = [Prompt(tokens, (picture(30 + i, 2, 5 + i),)) for i in range(6)]
    looker.engine.tables.reset_prefix_cache()
    looker.engine.scheduler.embedding_pool.clear()
    assert run(looker, [*others, prompt])[-1:] == alone


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([picture(1, 4, 20), picture(2, 10, 4)], "tokens 4 to 24 overlap .* 10 to 14"),
        ([picture(1, 10, 4), picture(2, 4, 4)], "overlap"),
        ([picture(1, 30, 20)], "the prompt has 40 tokens"),
        ([picture(1, -1, 4)], "the prompt has 40 tokens"),
        ([replace(picture(1, 0, 10), count=40)], "are 40, but the encoder makes 10 of them"),
        ([picture(1, 0, 30)], "has 60 items, at most 48"),
        ([replace(picture(1, 0, 4), encoder_input={"items": np.zeros((8, 4))})], r"expected uint8\[n, 5\]"),
        ([replace(picture(1, 0, 4), encoder_input={"items": np.ones((8, 5))})], r"is float64\[8, 5\], exp"),
        ([replace(picture(1, 0, 4), encoder_input={"items": 8})], r"is int\[\], expected uint8"),
        ([replace(picture(1, 0, 4), digest="digest")], "a digest that is not bytes"),
    ],
)  # fmt: skip
def test_spans_that_cannot_be_computed_are_refused(looker, spans, message):
    with pytest.raises((ValueError, TypeError), match=message):
        looker.generate(Prompt([PLACEHOLDER] * 40, tuple(spans)), GREEDY, use_tqdm=False)
    assert not looker.has_unfinished_requests()


def test_scores_of_embeddings_are_refused(looker):
    prompt = Prompt([PLACEHOLDER] * 40, (picture(1, 4, 20),))
    with pytest.raises(ValueError, match="prompt_logprobs is not allowed"):
        looker.generate(prompt, SamplingParams(prompt_logprobs=1), use_tqdm=False)


def test_a_text_model_refuses_embeddings():
    with pytest.raises(ValueError, match="the model has no encoder"):
        SpanLimits().check((picture(1, 0, 4),), 8)


def test_spans_of_one_block_must_fit_the_pool_together(reader):
    """A prefill with recurrent states begins at multiples of their blocks only."""
    spans = [picture(1, 0, 20), picture(2, 20, 20)]
    encoder = with_pair_encoder(reader).config.encoder
    SpanLimits(encoder, pool_rows=30).check(spans, 64)
    with pytest.raises(ValueError, match="40 embeddings are needed at once, but the pool holds 30"):
        SpanLimits(encoder, pool_rows=30, alignment=64).check(spans, 64)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"kv_role": "prefill", "kv_address": "127.0.0.1:0"}, "kv_role"),
        ({"audit_log": "log"}, "audit_log"),
    ],
)
def test_engines_that_cannot_have_an_encoder_refuse_it(reader, options, name):
    with pytest.raises(ValueError, match=f"{name} is not allowed: the model has an encoder"):
        LLM.from_params(reader.config, reader.params, **OPTIONS | options)


def test_a_pool_evicts_what_was_not_used_for_longest():
    pool, spans = EmbeddingPool(10), [picture(i, 10 * i, 4) for i in range(4)]

    def chunk(start: int, end: int) -> tuple[int, int]:
        """The tokens that a chunk can have, and how many of them are embeddings."""
        count, rows = pool.reserve_chunk(spans, start, end - start)
        return count, len(set(rows[rows >= 0].tolist()))

    assert chunk(5, 15) == (10, 4) and chunk(0, 2) == (2, 2)
    assert chunk(22, 30) == (0, 0) and chunk(15, 30) == (5, 0)  # the others are held
    pool.begin_step()
    assert chunk(0, 10) == (10, 4) and chunk(20, 30) == (10, 4)
    assert [span for span, _ in pool.take_unencoded()] == [spans[1], spans[0], spans[2]]
    pool.begin_step()
    assert chunk(0, 10) == (10, 4) and not pool.take_unencoded()
    pool.begin_step()
    assert chunk(10, 20) == (10, 4) and pool.take_unencoded()[0][0] == spans[1]


def test_text_programs_take_no_embeddings(tiny, reader):
    """A decode is the text model's, and only a prefill has more arguments."""
    shapes = Shape("prefill", 1, 64), Shape("decode", 8, 1)

    def lowered(model: Model, embedding_rows: int) -> list[str]:
        sizes = Sizes(256, 8, (32,), 16, embedding_rows=embedding_rows)
        lowering = LocalLowering.from_params(TargetOnly(model.config), model.params, sizes)
        return [lowering.lower(shape).as_text() for shape in shapes]

    text, with_encoder = lowered(tiny, 0), lowered(reader, 64)
    assert text[1] == with_encoder[1]
    assert text[0] != with_encoder[0] and "64x48" in with_encoder[0]
