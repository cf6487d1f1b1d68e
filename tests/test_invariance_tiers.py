"""Rows of the invariance suite for pages from the host's memory, from files, from a saved cache, and from
another engine."""

import time
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import pytest
from cases.invariance import LENGTHS, PARAMS, bits, prompts
from cases.models import LATENT, TINY
from fakes.tiers import always_fetching
from suite.fixtures import Model
from suite.marks import full

from duetto import LLM
from duetto.model.config import Dense, GroupedQuery, LayerKind
from duetto.model.draft_head import draft_head_spec
from duetto.model.draft_pair import Pair
from duetto.model.transformer import decoder_spec
from duetto.model.tree import init_params
from duetto.serve.engine.speculation.speculator_weights import SpeculatorWeights
from duetto.serve.engine.startup import start
from duetto.serve.llm.disaggregated import PrefillWorker

# programs of test_invariance.py's TIGHT
SMALL = {"max_batched_token_mem": 320, "page_size": 16, "max_prefill_tokens": 64, "decode_steps": 1}
SMALLER = SMALL | {"max_model_len": 112, "max_batched_token_mem": 112, "max_num_seqs": 4}


@pytest.mark.parametrize(
    "model",
    [
        "tiny",
        full("windows, int8 cache"),
        full("latent, fp8_e5m2 cache"),
        full("recurrent"),
        full("bfloat16"),
        full("demo"),
    ],
    indirect=True,
    scope="session",
)
def test_pages_from_host_and_saved_cache_have_the_same_bits(model, serve, expected, tmp_path):
    """Preempted requests go on from swapped pages, and prompts find what the pool has lost; then all of it is
    found again in a folder."""
    texts = prompts(model.config.vocab_size)
    with always_fetching(serve(**SMALL, swap_space=1)) as llm:
        for _ in range(3):
            assert [bits(o) for o in llm.generate(texts, PARAMS, use_tqdm=False)] == expected
        report = llm.report()
        assert report["tiers"]["fetched"] > 0 and report["compilations"] == 0
        assert llm.save_cache(tmp_path) == len(list(tmp_path.rglob("*.page"))) > 0
        llm.reset_prefix_cache(reset_connector=True)
        llm.load_cache(tmp_path)
        found = llm.generate(texts, PARAMS, use_tqdm=False)
        assert [bits(o) for o in found] == expected
        step = max(16, model.config.prefill_alignment)
        assert [o.num_cached_tokens for o in found] == [(n - 1) // step * step for n in LENGTHS]
        assert llm.report()["tiers"]["snapshot"]["hits"] > 0


@pytest.mark.parametrize("model", ["tiny", full("demo")], indirect=True, scope="session")
def test_pages_from_files_have_the_same_bits(model, serve, expected, tmp_path):
    """In the process that wrote them, and in one that is started over them; damaged ones are computed
    again."""
    texts, disk = prompts(model.config.vocab_size), {"kv_disk_space": 1, "kv_disk_path": str(tmp_path)}
    with always_fetching(serve(**SMALL, **disk)) as llm:
        for _ in range(2):
            assert [bits(o) for o in llm.generate(texts, PARAMS, use_tqdm=False)] == expected
        assert llm.report()["tiers"]["disk"]["hits"] > 0
    files = sorted(tmp_path.rglob("*.page"))
    for file in files[::3]:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    with always_fetching(serve(**SMALL, **disk)) as llm:
        assert [bits(o) for o in llm.generate(texts, PARAMS, use_tqdm=False)] == expected
        report = llm.report()["tiers"]["disk"]
        assert report["hits"] > 0 and report["damaged"] > 0


@pytest.mark.full
@pytest.mark.parametrize("model", ["tiny"], indirect=True, scope="session")
def test_draft_tokens_on_fetched_pages_change_no_bit(model, serve, expected):
    texts, config = (
        prompts(model.config.vocab_size),
        {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False},
    )
    with always_fetching(serve(**SMALL, swap_space=1, speculative_config=config)) as llm:
        for _ in range(2):
            assert [bits(o) for o in llm.generate(texts, PARAMS, use_tqdm=False)] == expected
        report = llm.report()
        assert report["tiers"]["fetched"] > 0 and report["speculation"]["drafted"] > 0


def draft(mixer: Any) -> SpeculatorWeights:
    """A model of one layer, which is seldom right."""
    config = replace(TINY, layers=(LayerKind(mixer, Dense(96)),))
    return SpeculatorWeights(init_params(jax.random.key(5), decoder_spec(config)), config)


def head(model: Model) -> SpeculatorWeights:
    return SpeculatorWeights(init_params(jax.random.key(5), draft_head_spec(model.config.hidden_size, 32)))


ITSELF = "a model that drafts for itself"
GUESSERS = {
    ITSELF: ("draft_model", 3, lambda model: SpeculatorWeights(model.params, model.config)),
    "a draft model with a window": ("draft_model", 3, lambda _: draft(GroupedQuery(6, 2, 8, window=20))),
    "a tree of a latent draft model": ("tree", 7, lambda _: draft(LATENT)),
    "heads": ("heads", 3, head),
    "a tree of heads": ("tree", 7, head),
}


@pytest.fixture
def guessing(serve, model, monkeypatch):
    """Starts engines beside which one of GUESSERS guesses at every step."""

    def begin(guesser: str, **options: Any) -> LLM:
        method, k, beside = GUESSERS[guesser]
        monkeypatch.setattr(start, "read_speculator", lambda *_: beside(model))
        config = {"method": method, "model": "beside", "num_speculative_tokens": k, "adaptive": False}
        return serve(speculative_config=config, **options)

    return begin


@pytest.mark.full
@pytest.mark.parametrize(
    "model, guesser",
    [
        *(("latent" if name == "a tree of heads" else "tiny", name) for name in GUESSERS),
        ("borrowed", ITSELF),
        ("borrowed", "a tree of heads"),
    ],
    indirect=["model"],
    scope="session",
)
def test_device_drafts_on_fetched_pages_change_no_token(model, guessing, oracle, tmp_path, guesser):
    """A draft model's keys come back with the target's: one that drafts for itself stays always right."""
    report = assert_tokens_on_fetched_pages(model, partial(guessing, guesser), oracle, tmp_path)
    found = report["speculation"]
    assert found["drafted"] > 0 and (guesser != ITSELF or found["accepted"] == found["drafted"])


@pytest.mark.full
@pytest.mark.parametrize("model", ["tiny"], indirect=True, scope="session")
def test_a_cache_saved_with_another_draft_model_is_refused(model, guessing, tmp_path):
    with guessing(ITSELF, **SMALLER) as llm:
        llm.save_cache(tmp_path)
        llm.load_cache(tmp_path)
        beside = jax.tree.map(lambda x: -x, model.params)
        llm.engine._arguments = replace(llm.engine._arguments, params=Pair(model.params, beside))
        with pytest.raises(ValueError, match="of another model, other weights"):
            llm.load_cache(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
    "model", ["int8", "int4", "fp8", "windows", "latent"], indirect=True, scope="session"
)
def test_pages_of_other_weights_and_layers_have_the_oracles_tokens(model, serve, oracle, tmp_path):
    assert_tokens_on_fetched_pages(model, serve, oracle, tmp_path)


def assert_tokens_on_fetched_pages(model: Model, serve, oracle, folder) -> dict[str, Any]:
    """One engine, whose pages come back from the host's memory, and then from a folder; its report."""
    texts, params, plain = prompts(model.config.vocab_size)[1:5], PARAMS[1:5], oracle(model)
    wanted = [plain(text, one) for text, one in zip(texts, params, strict=True)]

    def tokens(llm: LLM) -> list[list[int]]:
        return [o.outputs[0].token_ids for o in llm.generate(texts, params, use_tqdm=False)]

    with always_fetching(serve(**SMALLER, swap_space=1)) as llm:
        for _ in range(2):
            assert tokens(llm) == wanted
        report = llm.report()
        assert report["tiers"]["fetched"] > 0 and report["compilations"] == 0
        llm.save_cache(folder)
        llm.reset_prefix_cache(reset_connector=True)
        llm.load_cache(folder)
        assert tokens(llm) == wanted
        report = llm.report()
        assert report["tiers"]["snapshot"]["hits"] > 0
        return report


class Unreliable:
    """A source that loses every third page, or brings every third too late."""

    def __init__(self, source: PrefillWorker, slow: bool):
        self.source, self.slow, self.asked = source, slow, 0
        self.begin_prefill, self.cancel_prefill = source.begin_prefill, source.cancel_prefill
        self.expect_realm, self.room_bytes = source.expect_realm, source.room_bytes
        self.is_connected = True

    def fetch(self, key: bytes) -> bytes | None:
        self.asked += 1
        if self.asked % 3:
            return self.source.fetch(key)
        if not self.slow:
            return None
        time.sleep(0.02)
        return self.source.fetch(key)


@pytest.mark.parametrize(
    "model", ["tiny", full("windows, int8 cache"), full("recurrent")], indirect=True, scope="session"
)
def test_pages_that_another_engine_has_computed_have_the_same_bits(model, serve, expected):
    """All of them, some that are lost or late, and none where the other engine is late."""
    texts = prompts(model.config.vocab_size)
    with serve(**SMALL, kv_role="both") as llm:
        mover, step = llm.engine.page_finder.mover, max(16, model.config.prefill_alignment)
        peer, patience = mover.remote_kv, llm.engine.page_finder.patience_seconds
        source = peer.service
        for way in ("first", "lost", "slow", "late"):
            llm.engine.tables.reset_prefix_cache()
            peer.expect_realm(source.realm, peer.page_bytes)  # nothing is known to be there
            peer.service = source if way == "first" else Unreliable(source, way == "slow")
            peer.patience_seconds = 0.0 if way == "late" else 60.0
            llm.engine.page_finder.patience_seconds = (lambda pages: 0.01) if way == "slow" else patience
            found = llm.generate(texts, PARAMS, use_tqdm=False)
            assert [bits(o) for o in found] == expected
            if way == "first":
                assert [o.num_cached_tokens for o in found] == [(n - 1) // step * step for n in LENGTHS]
        report = llm.report()
        assert (report["preemptions"] > 0 or model.name != "tiny") and report["compilations"] == 0
        assert report["tiers"]["late"] > 0 and report["tiers"]["peer"]["late"] > 0
