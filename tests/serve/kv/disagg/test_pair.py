"""Two engines in one process, as their callers see them."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from cases.requests import SIZES

from duetto import LLM, SamplingParams
from duetto.serve.options.checks import KV_TRANSPORTS
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.roofline.report import render_engine_report

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SEVERAL = SamplingParams(n=3, temperature=0.9, seed=7, max_tokens=8, ignore_eos=True)


def prompt(i: int) -> list[int]:
    return np.random.default_rng(i).integers(3, 250, 50 + i).tolist()


@pytest.fixture(scope="module")
def one(tiny):
    with LLM.from_params(tiny.config, tiny.params, **SIZES) as llm:
        yield llm


@pytest.fixture(scope="module")
def pair(tiny):
    with LLM.from_params(tiny.config, tiny.params, kv_role="both", **SIZES) as llm:
        yield llm


def tokens(llm: LLM, *asked) -> list[list[int]]:
    return [list(c.token_ids) for o in llm.generate(*asked, use_tqdm=False) for c in o.outputs]


def test_completions_streams_and_scores_equal_those_of_one_engine(one, pair):
    assert tokens(pair, prompt(0), SEVERAL) == tokens(one, prompt(0), SEVERAL)
    streamed = [token for piece in pair.stream(prompt(1), GREEDY) for token in piece.token_ids]
    assert [streamed] == tokens(one, prompt(1), GREEDY)
    scored = replace_params(prompt_logprobs=1)
    found = [llm.generate(prompt(2), scored, use_tqdm=False)[0].prompt_logprobs for llm in (one, pair)]
    assert found[0] == found[1]
    report = pair.report()["tiers"]["peer"]
    assert report["asked"] > 0 and report["hits"] > 0
    assert f"peer {report['pages']} (0 MiB, {report['hits']} hits)" in render_engine_report(pair.report())


def replace_params(**fields) -> SamplingParams:
    params = GREEDY.clone()
    for name, value in fields.items():
        setattr(params, name, value)
    return params


def test_a_closed_stream_frees_its_pages_at_the_peer(pair):
    stream = pair.stream(prompt(3), GREEDY)
    next(stream)
    stream.close()
    peer = pair.engine.page_finder.mover.remote_kv
    assert peer.nbytes == 0 and not pair.engine.scheduler.has_work


def test_other_parameters_are_never_served_from_pages_of_these(one, pair, tiny):
    other = replace(tiny.params, embed=jax.device_put(np.asarray(tiny.params.embed)[::-1].copy()))
    asked = pair.report()["tiers"]["peer"]["asked"]
    for llm in (one, pair):
        llm.update_params(other)
    assert tokens(pair, prompt(0), GREEDY) == tokens(one, prompt(0), GREEDY)
    assert pair.report()["tiers"]["peer"]["asked"] == asked  # computed here
    for llm in (one, pair):
        llm.update_params(tiny.params)
    assert tokens(pair, prompt(4), GREEDY) == tokens(one, prompt(4), GREEDY)
    assert pair.report()["tiers"]["peer"]["asked"] == asked + 1


def test_requests_do_not_wait_for_a_sleeping_engine(one, pair):
    session = pair.engine.page_finder.mover.remote_kv.service.session
    for level in (0, 1):
        with session.hold_engine():
            session.engine.sleep(level)
        assert tokens(pair, prompt(7 + level), GREEDY) == tokens(one, prompt(7 + level), GREEDY)
        with session.hold_engine():
            session.engine.wake_up(("weights", "kv_cache", "scheduling"))
    hits = pair.report()["tiers"]["peer"]["hits"]
    assert tokens(pair, prompt(9), GREEDY) == tokens(one, prompt(9), GREEDY)
    assert pair.report()["tiers"]["peer"]["hits"] == hits + 3


def test_the_other_engine_may_fail(one, pair, monkeypatch, caplog):
    prefills = pair.engine.page_finder.mover.remote_kv.service

    def fails() -> None:
        raise ZeroDivisionError("as a test wants it")

    monkeypatch.setattr(prefills.session.engine, "step", fails)
    for i in (5, 6):
        assert tokens(pair, prompt(i), GREEDY) == tokens(one, prompt(i), GREEDY)
    assert "no prompts are computed for others any more: ZeroDivisionError" in caplog.text
    assert not prefills.is_connected


@pytest.mark.parametrize(
    "options, why",
    [
        ({"kv_role": "kv_both"}, "kv_role='kv_both' is not allowed: prefill, decode, both, or None"),
        ({"kv_role": "decode"}, "kv_role decode is not allowed without kv_address: host:port"),
        ({"kv_role": "decode", "kv_address": "here"}, "kv_address 'here' is not allowed: host:port"),
        ({"kv_role": "decode", "kv_address": "a:99999"}, "kv_address 'a:99999' is not allowed"),
        ({"kv_address": "a:1"}, "kv_address 'a:1' is not allowed with kv_role None: only prefill and decode"),
        ({"kv_role": "both", "kv_address": "a:1"}, "kv_address 'a:1' is not allowed with kv_role both"),
        ({"kv_role": "both", "prefill_devices": 1}, "are not allowed without each other: set both"),
        ({"prefill_devices": 1, "decode_devices": 1}, "prefill_devices 1 is not allowed with kv_role None"),
        (
            {"kv_role": "both", "tensor_parallel_size": 2},
            "tensor_parallel_size 2 is not allowed with kv_role",
        ),
        ({"kv_role": "both", "pipeline_parallel_size": 2}, "pipeline_parallel_size 2 is not allowed with"),
        (
            {"kv_role": "both", "data_parallel_size": 2},
            "data_parallel_size 2 is not allowed with kv_role both",
        ),
        ({"kv_role": "both", "nnodes": 2}, "nnodes 2 is not allowed with kv_role both: only 1"),
        ({"kv_role": "both", "enable_prefix_caching": False}, "without enable_prefix_caching: pages have no"),
        ({"kv_role": "both", "kv_transport": "nixl"}, "kv_transport 'nixl' is not allowed with kv_role both"),
        (
            {"kv_transport": "rdma"},
            f"kv_transport 'rdma' is not allowed: {', '.join(KV_TRANSPORTS)}, or None",
        ),
        ({"kv_transfer_timeout": -1.0}, "kv_transfer_timeout -1.0 is not allowed: 0 or more seconds"),
    ],
)
def test_what_cannot_be_is_refused(options, why):
    with pytest.raises(ValueError, match=why):
        EngineOptions(**options)
