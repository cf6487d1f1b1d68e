"""What the scheduler puts into a step: order, admission, preemption and the budget."""

import heapq
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fakes.engine import ask, expected, prompt_of, run, start

from duetto.kvcache.tables import PageTables
from duetto.serve.runtime.compiled.shapes import Shape

pytestmark = pytest.mark.usefixtures("unchecked")  # the executor is a fake, and so is what it takes


def test_decode_never_starves_behind_prompts():
    engine, executor = start(budget=4, chunk=4, pages=64, decode_steps=3)
    writers = [ask(prompt_of(i, 5), 30, i) for i in range(2)]
    for request in writers:
        engine.submit(request)
    for _ in range(4):
        engine.step()
    for arrival in range(2, 14):
        engine.submit(ask(prompt_of(arrival, 16), 1, arrival))
        running = engine.scheduler.running.values()
        ready = {r.slot for r in running if len(r.prompt) <= r.num_computed_tokens < r.end - 1}
        before = len(executor.ran)
        engine.step()
        rows = {phase: [] for phase in ("prefill", "decode")}
        for shape, works in executor.ran[before:]:
            rows[shape.phase] += works
        assert {writer.slot for writer in writers} <= ready <= {slot for slot, _, _ in rows["decode"]}
        assert 1 <= sum(count for _, _, count in rows["prefill"]) <= 4
        assert all(count == 1 for _, _, count in rows["decode"])  # several would make the prompt wait
    run(engine)


def test_the_first_prompt_of_the_queue_is_prefilled_first():
    engine, executor = start(budget=4, chunk=4)
    engine.submit(ask(prompt_of(0, 20), 1, 0, priority=1))
    engine.step()
    urgent = ask(prompt_of(1, 8), 2, 1, priority=0)
    engine.submit(urgent)
    engine.step()
    assert executor.ran[-1][1] == [(urgent.slot, 0, 4)]
    run(engine)


def test_preempted_requests_return_to_their_queue_position():
    engine, _ = start(pages=8, seats=3, max_model_len=28)
    requests = [ask(prompt_of(i, 7), 16, i) for i in range(4)]
    for request in requests:
        engine.submit(request)
    while not engine.scheduler.preemptions:
        engine.step()
    queue = [r for _, r in sorted(engine.scheduler.waiting, key=lambda entry: entry[0])]
    assert queue == [requests[2], requests[3]]  # the last that ran, before the one that has never run
    finished = []
    while engine.has_work:
        engine.step()
        finished += [r for r in requests if r.is_finished and r not in finished]
    assert finished == requests
    assert all((r.output_tokens, r.finish_reason) == expected(r) for r in requests)


class ComparingWarmup(SimpleNamespace):
    """A warm-up that compares programs in six pages when `has_work` is set."""

    def advance(self, arguments: Any, tables: PageTables) -> Any:
        self.has_work = False
        with tables.borrow_pages(self.needed_pages):
            return arguments.cache


@pytest.mark.parametrize("same_bits", [True, False])
def test_comparisons_of_programs_preempt_the_last_requests(same_bits):
    engine, _ = start(pages=12, seats=3, max_model_len=28, same_bits=same_bits)
    requests, warmup = [ask(prompt_of(i, 7), 16, i) for i in range(3)], cast(Any, ComparingWarmup())
    vars(warmup).update(needed_pages=6, classes=engine.classes, missing=(), is_done=False, is_compiling=False)
    for request in requests:
        engine.submit(request)
    engine.warmup = warmup
    for number in range(200):
        warmup.has_work = number % 8 == 7
        engine.step()
        if number == 7:
            assert not requests[0].preemptions and requests[2].preemptions
    assert all((r.output_tokens, r.finish_reason) == expected(r) for r in requests)


@pytest.mark.parametrize("same_bits", [True, False])
def test_preempted_requests_reuse_pages_that_are_still_cached(same_bits):
    engine, executor = start(pages=8, page_size=4, seats=2, same_bits=same_bits)
    first, second = ask(prompt_of(0, 8), 16, 0), ask(prompt_of(1, 8), 16, 1)
    for request in (first, second):
        engine.submit(request)
    while not second.preemptions:
        engine.step()
    engine.abort(first)
    known, before = len(second.tokens), len(executor.ran)
    run(engine)
    starts = [start for _, works in executor.ran[before:] for _, start, _ in works]
    # a full page of the prompt or, where their bits agree, of the outputs; its last pages went to the first
    # request
    assert min(starts) >= 4 and known > 8
    assert second.output_tokens == expected(second)[0]


@pytest.mark.parametrize("same_bits", [True, False])
@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("decode_steps", [1, 3])
def test_output_pages_are_found_where_bits_agree(same_bits, page_size, decode_steps):
    engine, _ = start(page_size=page_size, decode_steps=decode_steps, same_bits=same_bits)
    first = ask(prompt_of(0, 5), 14, 0)
    engine.submit(first)
    run(engine)
    again = ask([*first.tokens, 1], 2, 1)
    engine.submit(again)
    run(engine)
    # The last token is sampled, never fed.
    written = len(first.tokens) - 1 if same_bits else len(first.prompt)
    assert again.num_cached_tokens == written // page_size * page_size
    assert again.output_tokens == expected(again)[0]


def test_admission_leaves_a_spare_page_for_each_running_request():
    for pages, together in ((6, True), (5, False)):
        engine, _ = start(pages=pages, page_size=4, caching=False, max_model_len=20)
        requests = [ask(prompt_of(0, 8), 3, 0), ask(prompt_of(1, 12), 3, 1)]  # two pages and three
        for request in requests:
            engine.submit(request)
        engine.step()
        assert [r.slot is not None for r in requests] == [True, together]
        run(engine)
        assert [r.output_tokens for r in requests] == [expected(r)[0] for r in requests]


def test_admission_counts_found_pages_that_would_leave_the_free_list():
    engine, _ = start(pages=8, page_size=4, max_model_len=32)
    engine.submit(ask(prompt_of(0, 17), 1, 0))
    run(engine)
    runner, again = ask(prompt_of(1, 9), 8, 1), ask(prompt_of(0, 17), 1, 2)
    engine.submit(runner)
    engine.step()
    free = engine.tables.pools[0].num_free
    engine.submit(again)
    engine.step()
    assert free == 5 and again.slot is None  # five pages and a spare are wanted, four of them named and free
    run(engine)
    assert again.output_tokens == expected(again)[0] and again.num_cached_tokens > 0


def test_several_decode_steps_while_no_prompt_can_start():
    engine, executor = start(pages=6, page_size=4, decode_steps=4, max_model_len=24)
    engine.submit(ask(prompt_of(0, 8), 12, 0))
    engine.submit(ask(prompt_of(1, 20), 2, 1))
    run(engine)
    decodes = [works[0][2] for shape, works in executor.ran if shape.phase == "decode"]
    assert decodes[:2] == [4, 4]


def test_several_decode_steps_serve_the_rows_of_one_call():
    engine, executor = start(decode_steps=4)
    few = tuple(shape for shape in engine.classes.decode if shape.rows == 1 or shape.tokens == 1)
    engine._set_shape_classes(replace(engine.classes, decode=few))
    requests = [ask(prompt_of(0, 6), 13, 0), ask(prompt_of(1, 6), 4, 1)]
    for request in requests:
        engine.submit(request)
    run(engine)
    ran = Counter(shape for shape, _ in executor.ran if shape.phase == "decode")
    assert ran[Shape("decode", 4, 1)] >= 3 and ran[Shape("decode", 1, 4)] >= 2
    assert [r.output_tokens for r in requests] == [expected(r)[0] for r in requests]


def test_work_of_a_step_does_not_grow_with_the_queue():
    def opcodes(waiting: int) -> int:
        engine, _ = start(seats=2, pages=16)
        for arrival in range(2 + waiting):
            engine.submit(ask(prompt_of(0, 6), 8, arrival))
        for _ in range(3):
            engine.step()
        assert len(engine.scheduler.waiting) == waiting
        return count_opcodes(lambda: engine.scheduler.schedule(is_drained=False), "scheduler.py")

    assert opcodes(3) == opcodes(3000) > 100


def count_opcodes(call: Callable[[], Any], file: str) -> int:
    """Bytecode instructions that a call executes in one source file."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if not frame.f_code.co_filename.endswith(file):
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 reports opcodes only where a frame asked before
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_aborting_the_whole_queue_touches_no_entry_twice(monkeypatch):
    engine, _ = start(seats=1)
    requests = [ask(prompt_of(0, 6), 4, arrival) for arrival in range(200)]
    for request in requests:
        engine.submit(request)
    engine.step()
    pops, pop = [], heapq.heappop
    monkeypatch.setattr(heapq, "heappop", lambda heap: pops.append(heap[0]) or pop(heap))
    for request in requests[:50:-1] + requests[1:50]:
        engine.abort(request)
    run(engine)
    # Other entries are free slots, and prefills held back.
    line = [entry for entry in pops if isinstance(entry, tuple) and len(entry) == 2]
    assert len(line) == len({request.id for _, request in line}) <= 200 and not engine.scheduler.waiting
    assert len(pops) <= 402
    assert {r.finish_reason for r in requests[:51] if r not in requests[1:50]} == {"length"}
    assert all(r.finish_reason == "abort" and not r.output_tokens for r in requests[1:50] + requests[51:])


def test_a_short_prompt_costs_a_whole_row_of_the_budget():
    engine, executor = start(budget=6, chunk=4, rows=3, seats=4)
    for arrival in range(4):
        engine.submit(ask(prompt_of(arrival, 1), 1, arrival))
    engine.step()
    assert [len(works) for _, works in executor.ran] == [3]  # rows of two tokens that share a call


def test_a_scored_prompt_takes_a_call_for_each_chunk():
    engine, executor = start(budget=4, chunk=4)
    engine.submit(ask(prompt_of(0, 10), 1, prompt_logprobs=0))
    run(engine)
    assert [works for _, works in executor.ran] == [[(0, 0, 4)], [(0, 4, 4)], [(0, 8, 2)]]


def test_requests_are_preempted_only_within_their_shard():
    engine, _ = start(shards=2, pages=8, seats=2, max_model_len=28)
    long, short = (7, 16), (3, 13)  # pairs of the first do not fit a shard's cache to their end
    requests = [ask(prompt_of(i, own[0]), own[1], i) for i, own in enumerate((long, short, long, short))]
    for request in requests:
        engine.submit(request)
    engine.step()
    assert [request.slot for request in requests] == [0, 2, 1, 3]
    run(engine)
    assert [request.preemptions > 0 for request in requests] == [False, False, True, False]
    assert all((r.output_tokens, r.finish_reason) == expected(r) for r in requests)


def test_a_full_shard_gets_no_request_despite_its_prefix():
    engine, _ = start(shards=2, seats=1)
    first, second = (ask(prompt_of(0, 16, own=1), 12, i) for i in range(2))
    engine.submit(first)
    for _ in range(4):
        engine.step()
    engine.submit(second)
    engine.step()
    assert (first.slot, second.slot) == (0, 1)
    run(engine)
    assert second.num_cached_tokens == 0 and all(
        (r.output_tokens, r.finish_reason) == expected(r) for r in (first, second)
    )
