"""When pages are kept and fetched, and who waits for them; over the fake device."""

import threading
import time

import pytest
from fakes.engine import ask, expected, prompt_of, run, start
from fakes.tiers import Forgetful, HandMover, attach

from duetto.serve.kv.offload.host import HostTier
from duetto.serve.kv.offload.later import WriteBehindTier
from duetto.serve.kv.offload.mover import FETCHES, FEWEST
from duetto.serve.kv.offload.tier import TierChain
from duetto.serve.kv.offload.tiering import ROUNDS, TRIES, KVOffloader
from duetto.serve.runtime.compiled.transfers import OFFERED

pytestmark = pytest.mark.usefixtures("unchecked")  # the programs are fakes, and so is what they take


def serve(engine, mover: HandMover | None, *requests) -> None:
    for request in requests:
        engine.submit(request)
    for _ in range(500):
        if not engine.has_work:
            break
        engine.step()
        if mover is not None:
            mover.work()
    assert [r.outputs for r in requests] == [expected(r)[0] for r in requests]


def flooded(pages: int = 8, tier: int = 100, **options):
    """An engine whose pool has lost the pages of a first request, and that request."""
    engine, programs = start(pages=pages, page_size=4, max_model_len=4 * pages, **options)
    mover = attach(engine, programs, tier)
    first = ask(prompt_of(0, 13), 2, 0)
    serve(engine, mover, first)
    serve(engine, mover, ask(prompt_of(1, 4 * pages - 2), 2, 1))
    return engine, programs, mover


def test_pages_that_the_pool_loses_come_back():
    engine, programs, mover = flooded()
    again, before = ask(prompt_of(0, 13), 2, 2), len(programs.ran)
    serve(engine, mover, again)
    assert again.cached == 12 and engine.report()["tiers"]["fetched"] == 3
    computed = [row for shape, rows in programs.ran[before:] for row in rows if shape.phase == "prefill"]
    assert computed == [(again.slot or 0, 12, 1)]


def test_a_prompt_waits_for_its_pages_while_others_go_on():
    engine, _, mover = flooded()
    other = ask(prompt_of(2, 3), 12, 2, priority=0)
    engine.submit(other)
    engine.step()
    waits = ask(prompt_of(0, 13), 2, 3)
    engine.submit(waits)
    length = len(other.tokens)
    for _ in range(4):
        engine.step()
        assert waits.slot is None
    assert len(other.tokens) >= length + 3
    mover.work()
    engine.step()
    assert waits.slot is not None and waits.computed >= 12
    run(engine)
    assert waits.outputs == expected(waits)[0]


def test_what_somebody_waits_for_goes_before_what_is_kept():
    """But for pages that are among those yet to be kept."""
    engine, _, mover = flooded()
    serve(engine, None, ask(prompt_of(3, 30), 2, 2), ask(prompt_of(4, 30), 2, 3))
    assert len(mover._jobs) > 1  # nothing is kept yet
    soon, later = ask(prompt_of(0, 13), 2, 4), ask(prompt_of(3, 13), 2, 5)
    engine.submit(soon)
    engine.step()
    mover.work(1)
    engine.step()
    assert soon.slot is not None and soon.cached == 12
    run(engine)
    engine.submit(later)
    engine.step()
    mover.work(1)
    engine.step()
    assert later.slot is None
    mover.work()
    run(engine)
    assert later.cached == 12
    assert [soon.outputs, later.outputs] == [expected(r)[0] for r in (soon, later)]


def test_nobody_waits_for_ever():
    engine, _, mover = flooded()
    late = ask(prompt_of(0, 13), 2, 2)
    engine.submit(late)
    engine.step()
    assert late.ticket is not None and late.ticket.is_pending
    late.ticket.until = time.monotonic() - 1
    run(engine)  # the mover does nothing
    assert late.outputs == expected(late)[0] and late.cached == 0
    assert engine.report()["tiers"]["late"] == 3
    ticket = late.ticket
    mover.work()  # its pages arrive, and nobody is there
    assert mover._staged == 0 and ticket is None


def test_a_page_that_cannot_be_fetched_is_computed():
    engine, _, mover = flooded()
    (tier,) = mover.tier.tiers
    assert isinstance(tier, Forgetful)
    tier.every = 1  # loses each page that is asked for
    lost = ask(prompt_of(0, 13), 2, 2)
    serve(engine, mover, lost)
    assert lost.cached == 0 and engine.report()["tiers"]["fetched"] == 0
    assert tier.asked <= 3 * ROUNDS


def test_an_abort_while_pages_are_on_their_way_leaves_nothing_behind():
    engine, _, mover = flooded()
    gone = ask(prompt_of(0, 13), 2, 2)
    engine.submit(gone)
    engine.step()
    ticket = gone.ticket
    assert ticket is not None
    engine.abort(gone)
    assert ticket.dropped and gone.ticket is None
    mover.work()
    assert not ticket.parts and mover._staged == 0 and not engine.has_work
    serve(engine, mover, ask(prompt_of(0, 13), 2, 3))


def test_an_abort_while_pages_are_on_their_way_out_leaves_them_to_others():
    engine, programs = start(pages=8, page_size=4, seats=2)
    mover = attach(engine, programs, 100)
    first, gone = ask(prompt_of(0, 8), 16, 0), ask(prompt_of(1, 13), 12, 1)
    for request in (first, gone):
        engine.submit(request)
    while not mover._coming:  # pages of the second are written over, and are in no tier yet
        engine.step()
    assert gone.preemptions and not mover.tier.report()["host"]["pages"]
    engine.abort(gone)
    again = ask(prompt_of(1, 13), 12, 2)
    serve(engine, mover, again)
    assert engine.report()["tiers"]["fetched"] > 0 and again.cached == 12
    assert not mover._coming and mover._offered == [0] and mover._staged == 0
    assert first.outputs == expected(first)[0] and gone.finish_reason == "abort"


def test_a_preempted_request_goes_on_from_its_pages():
    """Decode writes other bits than prefill here: without a tier its outputs are fed through decode again."""
    engine, programs = start(pages=8, page_size=4, seats=2, same_bits=False)
    mover = attach(engine, programs, 100)
    first, second = ask(prompt_of(0, 8), 16, 0), ask(prompt_of(1, 8), 16, 1)
    for request in (first, second):
        engine.submit(request)
    while not second.preemptions:
        engine.step()
        mover.work()
    known = len(second.tokens)
    while second.slot is None:
        engine.step()
        mover.work()
    assert second.computed >= (known - 1) // 4 * 4 > 8
    serve(engine, mover)
    assert second.outputs == expected(second)[0]


def test_what_does_not_pay_is_neither_kept_nor_fetched():
    engine, _, mover = flooded()
    tiers = engine.tiers
    assert isinstance(tiers, KVOffloader)
    tiers.token_seconds = lambda: 1e-12
    for i in range(2, 2 + FEWEST):
        assert tiers.pays is None
        serve(engine, mover, ask(prompt_of(i % 2, 13 + 15 * (i % 2)), 2, i))
    assert tiers.pays is False
    before = engine.report()["tiers"]
    for i in range(5, 5 + TRIES):
        serve(engine, mover, ask(prompt_of(i % 2, 13 + 15 * (i % 2)), 2, i))
    after = engine.report()["tiers"]
    assert after["kept"] == before["kept"] and after["refused"] > before["refused"]
    assert after["pays"] is False and after["page_fetch_seconds"] > after["page_compute_seconds"]


def test_one_fetch_that_was_delayed_says_little():
    engine, _, mover = flooded()
    assert isinstance(engine.tiers, KVOffloader)
    engine.tiers.token_seconds = lambda: 1.0
    mover._rates.extend([1e-9, 1e9, 1e-9])
    assert engine.tiers.pays is True
    mover._rates.extend([1e9] * FETCHES)
    assert engine.tiers.pays is False


def test_pages_beyond_those_on_their_way_are_left_out():
    pages = 2 * OFFERED
    engine, programs = start(pages=pages, page_size=1, max_model_len=pages, budget=64, chunk=64)
    mover = attach(engine, programs, 10 * pages)
    for family in range(2):
        request = ask(prompt_of(family, pages - 2), 2, family)
        engine.submit(request)
        run(engine)  # the mover does nothing
    report = engine.report()["tiers"]
    assert 0 < report["kept"] <= OFFERED and report["left_out"] >= pages - 2 - OFFERED
    assert sum(mover._offered) <= OFFERED  # with what pads them
    mover.work()
    assert mover._offered == [0] and mover.tier.report()["host"]["pages"] == report["kept"]


def test_other_parameters_find_no_pages_of_these():
    engine, _, mover = flooded()
    assert mover.tier.report()["host"]["pages"] > 0
    engine.update_params(engine.params)
    assert mover.tier.report()["host"]["pages"] == 0
    again = ask(prompt_of(0, 13), 2, 2)
    serve(engine, mover, again)
    assert again.cached == 0


def test_parameters_whose_tiers_cannot_be_opened_find_no_pages_of_others():
    engine, _, mover = flooded()

    def fails(params: object) -> TierChain:
        raise ValueError("the folder is not allowed")

    mover.reopen = fails
    with pytest.raises(ValueError, match="not allowed"):
        engine.update_params(engine.params)
    again = ask(prompt_of(0, 13), 2, 2)
    serve(engine, mover, again)
    assert again.cached == 0 and mover.tier.report() == {}


def test_a_ticket_holds_nothing_once_its_pages_are_taken():
    engine, _, mover = flooded()
    again = ask(prompt_of(0, 13), 2, 2)
    engine.submit(again)
    engine.step()
    ticket = again.ticket
    assert ticket is not None
    serve(engine, mover)
    assert again.cached == 12 and ticket.parts == [] and ticket.dropped and mover._staged == 0


def test_prompts_share_a_prefix_that_is_computed_since_fetching_does_not_pay():
    """The first computes it; the others wait for its pages rather than compute the same."""
    engine, programs, mover = flooded(seats=4)
    serve(engine, mover, ask(prompt_of(0, 13), 2, 2))
    serve(engine, mover, ask(prompt_of(1, 30), 2, 3))
    tiers = engine.tiers
    assert isinstance(tiers, KVOffloader)
    tiers.token_seconds, tiers._asked = lambda: 1e-12, 0
    mover._rates.extend([1e9] * FEWEST)
    requests, before = [ask(prompt_of(0, 13, own=1), 2, 4 + i) for i in range(3)], len(programs.ran)
    serve(engine, mover, *requests)
    computed = sum(
        count for shape, rows in programs.ran[before:] if shape.phase == "prefill" for *_, count in rows
    )
    assert [r.cached for r in requests] == [0, 12, 12] and computed == 13 + 1 + 1


def test_outputs_that_were_fed_through_decode_again_are_found_the_next_time():
    engine, programs = start(pages=8, page_size=4, seats=2, same_bits=False)
    mover = attach(engine, programs, 100)
    request = ask(prompt_of(0, 6), 20, 0)
    engine.submit(request)
    while len(request.tokens) < 18:
        engine.step()
    engine.vacate()  # nothing was evicted: no page is anywhere
    while len(request.tokens) < 20:
        engine.step()
    engine._settle()
    engine.scheduler.preempt(request)
    found = engine.scheduler._find(request)
    assert len(found[0]) >= 4
    serve(engine, mover)
    assert request.outputs == expected(request)[0]


def test_pages_survive_the_sleep_of_an_engine_and_its_warm_up_lends_none_of_them():
    engine, _, mover = flooded()
    lent = engine.tables.lend(2, 0)
    assert lent is not None
    engine.tiers.lose()
    engine.tables.take_back(lent)
    waits = ask(prompt_of(0, 13), 2, 2)
    engine.submit(waits)
    engine.step()
    engine.vacate()
    assert waits.ticket is None and mover._staged == 0
    serve(engine, mover)
    assert waits.cached == 12 and waits.outputs == expected(waits)[0]


def test_the_end_of_an_engine_waits_for_a_disk_until_a_time_and_says_what_is_not_written(monkeypatch, caplog):
    engine, _, mover = flooded()
    may = threading.Event()

    class Hanging(HostTier):
        lasts = True

        def offer(self, key, content):
            assert may.wait(timeout=600)

    mover.tier = TierChain([WriteBehindTier(Hanging(1 << 20))])
    named = sum(len(pool.named()) for pool in engine.tables.pools)
    monkeypatch.setattr("duetto.serve.kv.offload.tiering.WRITING", 0.05)
    engine.close()
    may.set()
    assert named > 3 and f"{named} pages were not written within 0.05 seconds" in caplog.text
