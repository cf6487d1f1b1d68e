"""A report says why the request at the head of the queue waits, whichever part of admission refused it."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fakes.engine import ask, run, start

from duetto.serve.engine.core.engine import Engine
from duetto.serve.engine.core.waiting_reasons import AdmissionReason
from duetto.serve.engine.lora.lora_slots import LoRASlots
from duetto.serve.llm.metrics import engine_counters
from duetto.serve.server.routes.state import group_metrics


def reasons(engine: Engine) -> set[AdmissionReason]:
    """The reasons that were counted."""
    return {reason for reason, steps in engine.scheduler.waiting_reasons.counts.items() if steps}


def one_slot() -> Engine:
    engine, _ = start(seats=1)
    engine.submit(ask([1, 2, 3]))
    engine.submit(ask([4, 5, 6], arrival=1))
    return engine


def few_pages() -> Engine:
    engine, _ = start(pages=4)
    engine.submit(ask(range(12)))
    engine.submit(ask([4] * 8, arrival=1))
    return engine


def lopsided_shards() -> Engine:
    """Shard 0 has no free slot, shard 1 no free pages."""
    engine, _ = start(pages=4, seats=2, shards=2)
    for i, tokens in enumerate((2, 10, 2)):
        engine.submit(ask([i] * tokens, arrival=i))
    engine.step()
    assert sorted(engine.scheduler.config.shard_loads(engine.scheduler.running)) == [1, 2]
    engine.submit(ask([7] * 9, arrival=3))
    return engine


def one_adapter() -> Engine:
    engine, _ = start()
    engine.scheduler.lora_slots = places = LoRASlots(1)
    places.reserve(cast(Any, SimpleNamespace(digest=b"one")))
    engine.submit(ask([1, 2, 3]))
    engine.scheduler.waiting[0][1].adapter = cast(Any, SimpleNamespace(digest=b"two", name="two"))
    return engine


def shared_prefix() -> Engine:
    engine, _ = start(budget=8)
    engine.submit(ask(range(20)))
    engine.submit(ask(range(20), arrival=1))
    return engine


def pages_on_their_way() -> Engine:
    engine, _ = start()
    engine.submit(ask([1, 2, 3]))
    engine.scheduler.page_finder.find_or_fetch_prefix = lambda hashes, page_fetch: (None, page_fetch)
    return engine


def held_back() -> Engine:
    engine, _ = start(seats=1)
    for i in range(2):
        engine.submit(ask([i, i, i], arrival=i))
    engine.prefill_delayer.admission_limit = lambda free_slots, decode_rows, steps, tokens: 0
    return engine


CASES: dict[AdmissionReason, Callable[[], Engine]] = {
    AdmissionReason.NO_SLOT: one_slot,
    AdmissionReason.NO_PAGES: few_pages,
    AdmissionReason.SHARD_FULL: lopsided_shards,
    AdmissionReason.ADAPTER: one_adapter,
    AdmissionReason.PREFIX_PENDING: shared_prefix,
    AdmissionReason.KV_TRANSFER: pages_on_their_way,
    AdmissionReason.PREFILL_BATCHING: held_back,
}


@pytest.mark.parametrize("reason", AdmissionReason)
def test_each_reason_is_counted(reason: AdmissionReason):
    engine = CASES[reason]()
    engine.step()
    assert reasons(engine) == {reason}
    assert engine.report()["waiting_reasons"][reason.name.lower()] == 1
    assert engine.scheduler.waiting


def test_nothing_is_counted_while_every_request_runs():
    engine, _ = start()
    for i in range(4):
        engine.submit(ask([i, i, i], arrival=i))
    run(engine)
    assert set(engine.report()["waiting_reasons"].values()) == {0}


def test_each_waiting_request_logs_its_reason_once(caplog):
    engine = one_slot()
    engine.submit(ask([7, 8, 9], arrival=2))
    with caplog.at_level(logging.DEBUG, "duetto"):
        run(engine)
    assert engine.scheduler.waiting_reasons.counts[AdmissionReason.NO_SLOT] > 2
    waiting = [f"duetto: request {i} waits: every slot is taken" for i in (1, 2)]
    assert [record.getMessage() for record in caplog.records] == waiting


def test_a_metric_has_the_steps_of_each_reason():
    engine = one_slot()
    engine.step()
    found = [metric for metric in engine_counters(engine) if metric.name == "duetto:waiting_reasons"]
    assert {metric.labels["reason"]: metric.value for metric in found} == engine.report()["waiting_reasons"]
    (family,) = group_metrics(found, {})
    samples = {(s.name, s.labels["reason"]): s.value for s in family.samples}
    assert samples["duetto:waiting_reasons_total", "no_slot"] == 1
