"""Requests with other cache salts share no cached page, and have the same tokens."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases.requests import SIZES

from duetto import LLM, BeamSearchParams, SamplingParams
from duetto.serve.kv.events import BlockStored, EventTranslator
from duetto.serve.text.cache_salt import MAX_SALT_CHARACTERS, client_salt, hash_salt

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SALTS = None, "a", "b", "a" * MAX_SALT_CHARACTERS


def prompt(i: int) -> list[int]:
    return np.random.default_rng(i).integers(3, 250, 50).tolist()


def salted(i: int, salt: Any) -> dict[str, Any]:
    return {"prompt_token_ids": prompt(i), "cache_salt": salt}


def cached(outputs: Any) -> list[int]:
    return [output.num_cached_tokens for output in outputs]


@pytest.fixture(scope="module")
def llm(tiny) -> Iterator[LLM]:
    with LLM.from_params(tiny.config, tiny.params, **SIZES) as llm:
        yield llm


def test_only_requests_of_one_salt_share_pages(llm):
    plain = llm.generate(prompt(0), GREEDY, use_tqdm=False)
    first = [llm.generate(salted(0, salt), GREEDY, use_tqdm=False)[0] for salt in SALTS]
    again = llm.generate([salted(0, salt) for salt in SALTS], GREEDY, use_tqdm=False)
    assert cached(plain) == [0] and cached(first) == [48, 0, 0, 0] and cached(again) == [48] * 4
    assert {tuple(o.outputs[0].token_ids) for o in plain + first + again} == {
        tuple(plain[0].outputs[0].token_ids)
    }


def test_another_salt_does_not_wait_for_a_running_prompt(llm):
    asked = [salted(1, salt) for salt in ("a", "b", "a")]
    assert cached(llm.generate(asked, GREEDY, use_tqdm=False)) == [0, 0, 48]


def test_beams_likelihoods_and_embeddings_have_their_prompts_salt(llm):
    beams = BeamSearchParams(beam_width=2, max_tokens=2)
    for i, ask in enumerate((
        lambda given: llm.beam_search(given, beams),
        lambda given: llm.log_likelihood([given], [[5, 6]], by="decode"),
        lambda given: llm.embed(given, use_tqdm=False),
    ), 2):  # fmt: skip
        ask(salted(i, "a"))
        found = [llm.generate(salted(i, salt), GREEDY, use_tqdm=False) for salt in ("b", "a", None)]
        assert [cached(one) for one in found] == [[0], [48], [0]]


@pytest.mark.parametrize("salt", ["", 3, b"a", ["a"], "a" * (MAX_SALT_CHARACTERS + 1)])
def test_what_is_no_salt_is_refused(llm, salt):
    with pytest.raises(ValueError, match="cache_salt=.* is not allowed: a string of 1 to 1024 characters"):
        llm.generate(salted(0, salt), GREEDY, use_tqdm=False)


def test_saved_pages_are_found_by_their_salt(tiny, llm, tmp_path):
    llm.generate([salted(5, "a"), prompt(6)], GREEDY, use_tqdm=False)
    llm.save_cache(tmp_path)
    with LLM.from_params(tiny.config, tiny.params, **SIZES) as other:
        other.load_cache(tmp_path)
        asked = [salted(5, "b"), prompt(5), salted(5, "a"), salted(6, "a"), prompt(6)]
        assert cached(other.generate(asked, GREEDY, use_tqdm=False)) == [0, 0, 48, 0, 48]


def test_another_engine_computes_prompts_under_their_salt(tiny):
    with LLM.from_params(tiny.config, tiny.params, kv_role="both", **SIZES) as pair:
        found = [pair.generate(salted(0, salt), GREEDY, use_tqdm=False)[0] for salt in (None, "a", "b", "a")]
        peer = pair.report()["tiers"]["peer"]
    assert len({tuple(o.outputs[0].token_ids) for o in found}) == 1
    assert peer["asked"] == peer["answered"] == 3 and peer["pages"] == peer["hits"] == 9


def test_events_have_the_digest_of_a_first_pages_salt(llm):
    told: list[BlockStored] = []
    translator = EventTranslator(llm.engine.scheduler.root_hash or b"", llm.engine.tables.page_size)

    class Noted:
        def on_stored(self, *page: Any) -> None:
            told.append(translator.translate_stored(*page))

        def on_removed(self, page_hash: bytes) -> None:
            translator.translate_removed(page_hash)

    pool = llm.engine.tables.pools[0]
    pool.listener = Noted()
    llm.generate(salted(7, "secret"), GREEDY.clone(), use_tqdm=False)
    pool.listener = None
    assert [event.extra_keys for event in told] == [[(hash_salt("secret").hex(),)], None, None]


def test_isolated_salts_depend_on_key_and_salt():
    keys, salts = ("00" * 32, "01" * 32), (None, "a", "b")
    found = [client_salt("key", key, salt) for key in keys for salt in salts]
    assert len({*found}) == 6 and all(len(salt) == 32 for salt in found)
    assert found[:3] == [client_salt("key", keys[0], salt) for salt in salts]
    assert [client_salt("none", keys[0], salt) for salt in salts] == list(salts)
    assert client_salt("key", keys[0], 3) == 3
    assert len({hash_salt(salt) for salt in (*found, *salts, "\ud800")}) == 10 and hash_salt(None) == b""
