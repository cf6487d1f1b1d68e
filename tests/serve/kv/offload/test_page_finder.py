"""When pages are kept and fetched, and who waits for them; over the fake device."""

import threading
import time

import pytest
from fakes.engine import ask, expected, prompt_of, run, start
from fakes.tiers import Forgetful, HandMover, attach

from duetto.serve.kv.offload.host import HostTier
from duetto.serve.kv.offload.mover import MIN_RATE_FETCHES, RATE_FETCHES
from duetto.serve.kv.offload.page_finder import MAX_FETCH_ROUNDS, TRIAL_INTERVAL, KVOffloader
from duetto.serve.kv.offload.tier import TierChain
from duetto.serve.kv.offload.write_behind import WriteBehindTier
from duetto.serve.runtime.compiled.transfers import MAX_OFFERED_PAGES

pytestmark = pytest.mark.usefixtures("unchecked")  # the executor is a fake, and so is what it takes


def serve(engine, mover: HandMover | None, *requests) -> None:
    for request in requests:
        engine.submit(request)
    for _ in range(500):
        if not engine.has_work:
            break
        engine.step()
        if mover is not None:
            mover.work()
    assert [r.output_tokens for r in requests] == [expected(r)[0] for r in requests]


def flooded(pages: int = 8, tier: int = 100, **options):
    """An engine whose pool has lost the pages of a first request, and that request."""
    engine, executor = start(pages=pages, page_size=4, max_model_len=4 * pages, **options)
    mover = attach(engine, executor, tier)
    first = ask(prompt_of(0, 13), 2, 0)
    serve(engine, mover, first)
    serve(engine, mover, ask(prompt_of(1, 4 * pages - 2), 2, 1))
    return engine, executor, mover


def test_pages_that_the_pool_loses_come_back():
    engine, executor, mover = flooded()
    again, before = ask(prompt_of(0, 13), 2, 2), len(executor.ran)
    serve(engine, mover, again)
    assert again.num_cached_tokens == 12 and engine.report()["tiers"]["fetched"] == 3
    computed = [row for shape, rows in executor.ran[before:] for row in rows if shape.phase == "prefill"]
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
    assert waits.slot is not None and waits.num_computed_tokens >= 12
    run(engine)
    assert waits.output_tokens == expected(waits)[0]


def test_awaited_fetches_run_before_offloads():
    """But for pages that are among those yet to be kept."""
    engine, _, mover = flooded()
    serve(engine, None, ask(prompt_of(3, 30), 2, 2), ask(prompt_of(4, 30), 2, 3))
    assert len(mover._jobs) > 1  # nothing is kept yet
    soon, later = ask(prompt_of(0, 13), 2, 4), ask(prompt_of(3, 13), 2, 5)
    engine.submit(soon)
    engine.step()
    mover.work(1)
    engine.step()
    assert soon.slot is not None and soon.num_cached_tokens == 12
    run(engine)
    engine.submit(later)
    engine.step()
    mover.work(1)
    engine.step()
    assert later.slot is None
    mover.work()
    run(engine)
    assert later.num_cached_tokens == 12
    assert [soon.output_tokens, later.output_tokens] == [expected(r)[0] for r in (soon, later)]


def test_queued_requests_time_out():
    engine, _, mover = flooded()
    late = ask(prompt_of(0, 13), 2, 2)
    engine.submit(late)
    engine.step()
    assert late.page_fetch is not None and late.page_fetch.is_pending
    late.page_fetch.deadline = time.monotonic() - 1
    run(engine)  # the mover does nothing
    assert late.output_tokens == expected(late)[0] and late.num_cached_tokens == 0
    assert engine.report()["tiers"]["late"] == 3
    ticket = late.page_fetch
    mover.work()  # its pages arrive, and nobody is there
    assert mover.staged_pages == 0 and ticket is None


def test_a_page_that_cannot_be_fetched_is_computed():
    engine, _, mover = flooded()
    (tier,) = mover.tier.tiers
    assert isinstance(tier, Forgetful)
    tier.every = 1  # loses each page that is asked for
    lost = ask(prompt_of(0, 13), 2, 2)
    serve(engine, mover, lost)
    assert lost.num_cached_tokens == 0 and engine.report()["tiers"]["fetched"] == 0
    assert tier.asked <= 3 * MAX_FETCH_ROUNDS


def test_an_abort_during_a_page_fetch_frees_everything():
    engine, _, mover = flooded()
    gone = ask(prompt_of(0, 13), 2, 2)
    engine.submit(gone)
    engine.step()
    ticket = gone.page_fetch
    assert ticket is not None
    engine.abort(gone)
    assert ticket.is_dropped and gone.page_fetch is None
    mover.work()
    assert not ticket.parts and mover.staged_pages == 0 and not engine.has_work
    serve(engine, mover, ask(prompt_of(0, 13), 2, 3))


def test_an_abort_during_an_offload_keeps_the_pages():
    engine, executor = start(pages=8, page_size=4, seats=2)
    mover = attach(engine, executor, 100)
    first, gone = ask(prompt_of(0, 8), 16, 0), ask(prompt_of(1, 13), 12, 1)
    for request in (first, gone):
        engine.submit(request)
    while not mover.pending_offers:  # pages of the second are written over, and are in no tier yet
        engine.step()
    assert gone.preemptions and not mover.tier.report()["host"]["pages"]
    engine.abort(gone)
    again = ask(prompt_of(1, 13), 12, 2)
    serve(engine, mover, again)
    assert engine.report()["tiers"]["fetched"] > 0 and again.num_cached_tokens == 12
    assert not mover.pending_offers and mover.offered_pages == [0] and mover.staged_pages == 0
    assert first.output_tokens == expected(first)[0] and gone.finish_reason == "abort"


def test_a_preempted_request_goes_on_from_its_pages():
    """Decode writes other bits than prefill here: without a tier its outputs are fed through decode again."""
    engine, executor = start(pages=8, page_size=4, seats=2, same_bits=False)
    mover = attach(engine, executor, 100)
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
    assert second.num_computed_tokens >= (known - 1) // 4 * 4 > 8
    serve(engine, mover)
    assert second.output_tokens == expected(second)[0]


def test_unprofitable_pages_are_neither_offloaded_nor_fetched():
    engine, _, mover = flooded()
    tiers = engine.page_finder
    assert isinstance(tiers, KVOffloader)
    tiers.token_seconds = lambda: 1e-12
    for i in range(2, 2 + MIN_RATE_FETCHES):
        assert tiers.is_fetch_faster is None
        serve(engine, mover, ask(prompt_of(i % 2, 13 + 15 * (i % 2)), 2, i))
    assert tiers.is_fetch_faster is False
    before = engine.report()["tiers"]
    for i in range(5, 5 + TRIAL_INTERVAL):
        serve(engine, mover, ask(prompt_of(i % 2, 13 + 15 * (i % 2)), 2, i))
    after = engine.report()["tiers"]
    assert after["kept"] == before["kept"] and after["refused"] > before["refused"]
    assert after["pays"] is False and after["page_fetch_seconds"] > after["page_compute_seconds"]


def test_one_delayed_fetch_hardly_changes_the_estimate():
    engine, _, mover = flooded()
    assert isinstance(engine.page_finder, KVOffloader)
    engine.page_finder.token_seconds = lambda: 1.0
    mover.fetch_rates.extend([1e-9, 1e9, 1e-9])
    assert engine.page_finder.is_fetch_faster is True
    mover.fetch_rates.extend([1e9] * RATE_FETCHES)
    assert engine.page_finder.is_fetch_faster is False


def test_pages_beyond_the_offload_queue_are_dropped():
    pages = 2 * MAX_OFFERED_PAGES
    engine, executor = start(pages=pages, page_size=1, max_model_len=pages, budget=64, chunk=64)
    mover = attach(engine, executor, 10 * pages)
    for family in range(2):
        request = ask(prompt_of(family, pages - 2), 2, family)
        engine.submit(request)
        run(engine)  # the mover does nothing
    report = engine.report()["tiers"]
    assert 0 < report["kept"] <= MAX_OFFERED_PAGES and report["left_out"] >= pages - 2 - MAX_OFFERED_PAGES
    assert sum(mover.offered_pages) <= MAX_OFFERED_PAGES  # with what pads them
    mover.work()
    assert mover.offered_pages == [0] and mover.tier.report()["host"]["pages"] == report["kept"]


def test_other_parameters_find_no_pages_of_these():
    engine, _, mover = flooded()
    assert mover.tier.report()["host"]["pages"] > 0
    engine.update_params(engine.params)
    assert mover.tier.report()["host"]["pages"] == 0
    again = ask(prompt_of(0, 13), 2, 2)
    serve(engine, mover, again)
    assert again.num_cached_tokens == 0


def test_new_weights_find_no_old_pages_if_tiers_fail():
    engine, _, mover = flooded()

    def fails(params: object) -> TierChain:
        raise ValueError("the folder is not allowed")

    mover.reopen_tiers = fails
    with pytest.raises(ValueError, match="not allowed"):
        engine.update_params(engine.params)
    again = ask(prompt_of(0, 13), 2, 2)
    serve(engine, mover, again)
    assert again.num_cached_tokens == 0 and mover.tier.report() == {}


def test_a_fetch_holds_nothing_once_its_pages_are_taken():
    engine, _, mover = flooded()
    again = ask(prompt_of(0, 13), 2, 2)
    engine.submit(again)
    engine.step()
    ticket = again.page_fetch
    assert ticket is not None
    serve(engine, mover)
    assert (
        again.num_cached_tokens == 12 and ticket.parts == [] and ticket.is_dropped and mover.staged_pages == 0
    )


def test_prompts_share_a_prefix_too_slow_to_fetch():
    """The first computes it; the others wait for its pages rather than compute the same."""
    engine, executor, mover = flooded(seats=4)
    serve(engine, mover, ask(prompt_of(0, 13), 2, 2))
    serve(engine, mover, ask(prompt_of(1, 30), 2, 3))
    tiers = engine.page_finder
    assert isinstance(tiers, KVOffloader)
    tiers.token_seconds, tiers._fetch_decisions = lambda: 1e-12, 0
    mover.fetch_rates.extend([1e9] * MIN_RATE_FETCHES)
    requests, before = [ask(prompt_of(0, 13, own=1), 2, 4 + i) for i in range(3)], len(executor.ran)
    serve(engine, mover, *requests)
    computed = sum(
        count for shape, rows in executor.ran[before:] if shape.phase == "prefill" for *_, count in rows
    )
    assert [r.num_cached_tokens for r in requests] == [0, 12, 12] and computed == 13 + 1 + 1


def test_outputs_recomputed_by_decode_are_found_next_time():
    engine, executor = start(pages=8, page_size=4, seats=2, same_bits=False)
    mover = attach(engine, executor, 100)
    request = ask(prompt_of(0, 6), 20, 0)
    engine.submit(request)
    while len(request.tokens) < 18:
        engine.step()
    engine.preempt_and_reset_cache()  # nothing was evicted: no page is anywhere
    while len(request.tokens) < 20:
        engine.step()
    engine._commit_steps_in_flight()
    engine.scheduler.preempt(request)
    found = engine.scheduler._find_prefix(request)
    assert len(found[0]) >= 4
    serve(engine, mover)
    assert request.output_tokens == expected(request)[0]


def test_tiers_keep_pages_through_warm_up_and_sleep():
    engine, _, mover = flooded()
    with engine.tables.borrow_pages(2):
        engine.page_finder.discard_evicted()
    waits = ask(prompt_of(0, 13), 2, 2)
    engine.submit(waits)
    engine.step()
    engine.preempt_and_reset_cache()
    assert waits.page_fetch is None and mover.staged_pages == 0
    serve(engine, mover)
    assert waits.num_cached_tokens == 12 and waits.output_tokens == expected(waits)[0]


def test_closing_waits_for_the_disk_and_reports_unwritten_pages(monkeypatch, caplog):
    engine, _, mover = flooded()
    may = threading.Event()

    class Hanging(HostTier):
        is_persistent = True

        def offer(self, key, content):
            assert may.wait(timeout=600)

    mover.tier = TierChain([WriteBehindTier(Hanging(1 << 20))])
    named = sum(len(pool.list_cached_pages()) for pool in engine.tables.pools)
    monkeypatch.setattr("duetto.serve.kv.offload.page_finder.FLUSH_SECONDS", 0.05)
    engine.close()
    may.set()
    assert named > 3 and f"{named} pages were not written within 0.05 seconds" in caplog.text
