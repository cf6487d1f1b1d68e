"""Which prompts another engine is asked to compute, and who waits for it; over the fake device."""

import time

import pytest
from fakes.engine import ask, expected, prompt_of, run
from fakes.handover import FakeSource, decode_side, peer_of, soon

pytestmark = pytest.mark.usefixtures("unchecked")  # the executor is a fake, and so is what it takes


def waiting(source: FakeSource, *requests, **sizes):
    engine = decode_side(source, **sizes)
    for request in requests:
        engine.submit(request)
    for _ in range(3):
        engine.step()
    return engine


def test_a_prompt_waits_for_its_prefill_but_no_missing_page():
    source, request = FakeSource(), ask(prompt_of(0, 13), 3)
    engine = waiting(source, request)
    assert request.slot is None and [prompt for prompt, _ in source.asked] == [tuple(request.prompt)]
    source.asked[0][1]([b"x" * 16 + b"\0"])
    run(engine)
    assert request.output_tokens == expected(request)[0] and request.num_cached_tokens == 0


def test_short_and_cached_prompts_start_no_remote_prefill():
    source = FakeSource()
    short, first, again = ask(prompt_of(0, 4), 3, 0), ask(prompt_of(1, 13), 3, 1), ask(prompt_of(1, 13), 3, 2)
    engine = waiting(source, short)
    run(engine)
    engine.submit(first)
    engine.step()
    source.asked[0][1]([])
    run(engine)
    engine.submit(again)
    run(engine)
    assert len(source.asked) == 1 and again.num_cached_tokens == 12
    assert all(r.output_tokens == expected(r)[0] for r in (short, first, again))


def test_a_late_engine_is_not_used_until_it_answers():
    source, requests = FakeSource(), [ask(prompt_of(i, 13), 3, i) for i in range(3)]
    engine = waiting(source, *requests, patience=0.05)
    began = time.monotonic()
    run(engine, 10_000)
    assert time.monotonic() - began < 60
    assert all(r.output_tokens == expected(r)[0] for r in requests)
    peer = peer_of(engine)
    assert peer.late == 1 and peer.nbytes == 0
    assert peer.request_prefill([1, 2, 3], 1) is None
    source.asked[0][1]([])
    assert peer.request_prefill([1, 2, 3], 1) is not None


def test_remote_prefills_are_bounded_by_free_page_memory():
    page = 16 * 4
    source, requests = FakeSource(room_bytes=6 * page), [ask(prompt_of(i, 13), 3, i) for i in range(4)]
    engine = waiting(source, *requests)
    assert len(source.asked) == 2
    for i in range(4):
        source.asked[i][1]([])
        soon(lambda i=i: (engine.step(), len(source.asked) >= min(4, i + 2))[1])
    run(engine)
    assert all(r.output_tokens == expected(r)[0] for r in requests) and peer_of(engine).nbytes == 0


def test_higher_priorities_are_prefilled_beyond_the_memory_bound():
    source, first = FakeSource(room_bytes=1), ask(prompt_of(0, 13), 3, 0, priority=1)
    urgent = ask(prompt_of(1, 13), 3, 1, priority=0)
    engine = waiting(source, first, urgent)
    assert [prompt for prompt, _ in source.asked] == [tuple(first.prompt), tuple(urgent.prompt)]
    for _, ready in source.asked:
        ready([])
    run(engine)
    assert urgent.output_tokens == expected(urgent)[0] and first.output_tokens == expected(first)[0]


def test_an_abort_frees_all_pages_and_requests():
    source = FakeSource(room_bytes=1)
    gone, behind = ask(prompt_of(0, 13), 3, 0), ask(prompt_of(1, 13), 3, 1)
    engine = waiting(source, gone, behind)
    engine.abort(behind)
    engine.abort(gone)
    assert source.left == [0] and not engine.has_work
    peer = peer_of(engine)
    assert peer.nbytes == 0 and not peer._queue


def test_nothing_is_requested_from_a_disconnected_engine():
    source, request = FakeSource(), ask(prompt_of(0, 13), 3)
    source.is_connected = False
    engine = waiting(source, request)
    run(engine)
    assert not source.asked and request.output_tokens == expected(request)[0]


def test_a_page_of_another_size_is_not_taken():
    source, request = FakeSource(), ask(prompt_of(0, 13), 3)
    engine = waiting(source, request)
    keys = [name + b"\0" for name in engine.scheduler.prefix_hashes(request)]
    source.pages = dict.fromkeys(keys, b"x")
    source.asked[0][1](keys)
    run(engine, 100_000)
    report = engine.report()["tiers"]["peer"]
    assert request.output_tokens == expected(request)[0] and report["damaged"] == 3 and report["pages"] == 0


def test_pages_of_other_parameters_are_forgotten():
    source = FakeSource()
    engine = waiting(source, ask(prompt_of(0, 13), 3))
    peer = peer_of(engine)
    source.asked[0][1]([b"x" * 16 + b"\0"])
    assert peer.has(b"x" * 16 + b"\0")
    peer.expect_realm(b"other", [64])
    assert not peer.has(b"x" * 16 + b"\0") and source.realm == b"other"
