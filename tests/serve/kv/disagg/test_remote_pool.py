"""Several engines that compute prompts for one: which is asked, and what becomes of one that is not there."""

import pytest
from fakes.engine import ask, expected, prompt_of, run, start
from fakes.handover import REALM, SIZES, SOON, FakeSource, PrefillSide, far_at, soon, tiered

from duetto.serve.kv.disagg import client as client_module
from duetto.serve.kv.disagg.remote_tiers import RemoteKVPool, RemoteKVTier
from duetto.serve.kv.disagg.service import PrefillService
from duetto.serve.kv.offload.tier import TierChain
from duetto.serve.options.engine import EngineOptions

pytestmark = pytest.mark.usefixtures("unchecked")  # the executor is a fake, and so is what it takes


def decoding(**sources: PrefillService):
    """An engine, and the engines that it asks, by their addresses."""
    engine, executor = start(**SIZES)
    peers = RemoteKVPool({place: RemoteKVTier(source, SOON) for place, source in sources.items()})
    peers.expect_realm(REALM, tiered(engine, executor, TierChain([peers]), peers))
    return engine, peers


def asking(i: int, source: str | None):
    request = ask(prompt_of(i, 13), 3, i)
    request.prefill_address = source
    return request


def test_the_named_or_least_busy_engine_is_used():
    one, two = FakeSource(), FakeSource()
    engine, peers = decoding(a=one, b=two)
    requests = [asking(i, place) for i, place in enumerate(["b", "b", None, "evil:1"])]
    for request in requests:
        engine.submit(request)
    assert [len(tier.asked) for tier in (one, two)] == [2, 2]
    assert peers.report()["asked"] == 4 and peers.report()["at"]["b"]["asked"] == 2
    for source in (one, two):
        for _, ready in source.asked:
            ready([])
    run(engine)
    assert all(r.output_tokens == expected(r)[0] for r in requests)
    assert [tier.nbytes for tier in peers.tiers.values()] == [0, 0]


def test_another_engine_is_used_if_the_named_is_absent():
    one, two = FakeSource(), FakeSource()
    engine, _ = decoding(a=one, b=two)
    one.is_connected = False
    engine.submit(asking(0, "a"))
    assert (len(one.asked), len(two.asked)) == (0, 1)
    two.is_connected = False
    engine.submit(late := asking(1, "a"))
    assert late.page_fetch is None and len(two.asked) == 1
    two.asked[0][1]([])
    run(engine)
    assert late.output_tokens == expected(late)[0]


def test_pages_come_from_either_engine_while_one_ends(monkeypatch):
    monkeypatch.setattr(client_module, "CONNECT_RETRY_SECONDS", 0.01)
    sides = {"a": PrefillSide(), "b": PrefillSide()}
    fars = {place: far_at(side.port) for place, side in sides.items()}
    engine, peers = decoding(**fars)
    soon(lambda: all(far.is_connected for far in fars.values()))
    done = []
    for i, place in enumerate("abab"):
        if i == 3:
            sides["b"].end()
        engine.submit(request := asking(i, place))
        run(engine, 10_000)
        done.append(request)
    assert all(r.output_tokens == expected(r)[0] for r in done)
    assert [r.num_cached_tokens for r in done[:3]] == [12, 12, 12]
    at = peers.report()["at"]
    assert (at["a"]["hits"] >= 6, at["b"]["hits"]) == (True, 3) and peers.report()["is_here"] >= 1
    sides["a"].end()
    for far in fars.values():
        far.close()


@pytest.mark.parametrize(
    "role, address, why",
    [
        ("prefill", "a:1,b:2", "is not allowed with kv_role prefill: only one"),
        ("decode", "a:1,a:1", "each is another one"),
        ("decode", "a:1,", "kv_address '' is not allowed: host:port"),
    ],
)
def test_invalid_addresses_are_refused(role, address, why):
    with pytest.raises(ValueError, match=why):
        EngineOptions(kv_role=role, kv_address=address)
