"""An engine in use: streams, requests one step at a time, threads, new weights, failures and interrupts."""

import asyncio
import gc
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from cases.requests import GREEDY, IDS, PARAMS, PROMPTS, SEEDED, SIZES, exact, tokens

from duetto import LLM, RequestOutput, SamplingParams


@pytest.fixture(scope="module")
def start(tiny):
    return lambda **options: LLM.from_params(tiny.config, tiny.params, **(SIZES | options))


@pytest.fixture(scope="module")
def llm(start) -> Iterator[LLM]:
    with start() as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm) -> list[tuple]:
    return exact(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.fixture(autouse=True)
def nothing_is_left(llm):
    """Every test gives all pages back and leaves no request behind."""
    yield
    assert (
        not llm.has_unfinished_requests() and not llm._session.tickets and not llm.engine.scheduler.has_work
    )
    assert llm.engine.tables.occupancy == 0


# ---------------------------------------------------------------- streams, steps, threads


def test_stream_gives_what_generate_gives(llm):
    params = replace(SEEDED, n=3)
    stop = llm.generate(IDS, params, use_tqdm=False)[0].outputs[1].token_ids[2]
    params = replace(params, stop_token_ids=[stop])  # they end at different times
    (whole,) = llm.generate(IDS, params, use_tqdm=False)
    pieces = list(llm.stream(IDS, params))
    assert len({len(completion.token_ids) for completion in whole.outputs}) > 1
    for completion in whole.outputs:
        own = [piece for piece in pieces if piece.index == completion.index]
        assert [t for piece in own for t in piece.token_ids] == completion.token_ids
        assert [piece.finish_reason for piece in own] == [None] * (len(own) - 1) + [completion.finish_reason]


def test_a_stream_gives_what_others_steps_brought_before_it_steps(llm):
    one, two = (llm.stream(IDS, replace(GREEDY, max_tokens=40)) for _ in range(2))
    for stream in (one, two):
        next(stream)
    before = llm.report()["steps"]
    assert next(one).token_ids
    assert llm.report()["steps"] == before
    for stream in (one, two):
        stream.close()


def test_leaving_a_stream_aborts_it(llm):
    done = llm.report()["finish_reasons"].get("abort", 0)
    for piece in llm.stream(IDS, replace(GREEDY, max_tokens=100)):
        assert len(piece.token_ids) > 0
        assert llm.engine.tables.occupancy > 0
        break
    assert llm.engine.tables.occupancy == 0
    assert llm.report()["finish_reasons"]["abort"] == done + 1
    llm.stream(IDS, GREEDY)  # never asked for a piece: nothing has begun


def test_streams_in_an_event_loop(llm):
    async def collect(prompt: list[int], params: SamplingParams) -> list[int]:
        return [t async for piece in llm.astream(prompt, params) for t in piece.token_ids]

    async def main() -> tuple[list[list[int]], list[list[int]]]:
        together = await asyncio.gather(*(collect(p, s) for p, s in zip(PROMPTS, PARAMS, strict=True)))
        return together, tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False))  # as in a notebook's cell

    streamed, generated = asyncio.run(main())
    assert streamed == generated


def test_leaving_an_asynchronous_stream_aborts_it(llm):
    long = replace(GREEDY, max_tokens=100)

    async def leave() -> int:
        async for piece in llm.astream(IDS, long):
            return len(piece.token_ids)
        return 0

    async def consume() -> None:
        async for _ in llm.astream(IDS, long):
            await asyncio.sleep(0)

    async def cancel() -> None:
        task = asyncio.create_task(consume())
        while not llm._session.tickets:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert asyncio.run(leave()) > 0
    assert not llm._session.tickets
    asyncio.run(cancel())
    with pytest.raises(TypeError, match="a prompt is"):
        asyncio.run(anext(llm.astream(5)))


def test_requests_one_step_at_a_time(llm, expected):
    ids = [
        llm.add_request(p, s, request_id=f"r{i}")
        for i, (p, s) in enumerate(zip(PROMPTS, PARAMS, strict=True))
    ]
    with pytest.raises(ValueError, match="'r0' is in use"):
        llm.add_request(IDS, GREEDY, request_id="r0")
    other = llm.generate(
        IDS, GREEDY, use_tqdm=False
    )  # drives the queued ones along and leaves their results alone
    found: dict[str, RequestOutput] = {}
    while llm.has_unfinished_requests():
        found |= {output.request_id: output for output in llm.step()}
    assert exact([found[i] for i in ids]) == expected
    assert tokens(other) == [expected[0][0]]


def test_an_id_of_the_users_does_not_collide(llm):
    last = int(llm.generate(IDS, GREEDY, use_tqdm=False)[0].request_id)
    taken = [str(last + 1), str(last + 2)]
    for id in taken:
        llm.add_request(IDS, GREEDY, request_id=id)
    assert llm.add_request(IDS, GREEDY) not in taken
    done = [output.request_id for _ in range(40) for output in llm.step()]
    assert set(taken) < set(done) and len(done) == 3


def test_abort(llm):
    (whole,) = tokens(llm.generate(IDS, replace(GREEDY, max_tokens=50), use_tqdm=False))
    kept = llm.add_request(IDS, GREEDY)
    ended = llm.add_request(IDS, replace(GREEDY, max_tokens=50))
    unborn = llm.add_request(IDS, GREEDY)
    llm.abort(unborn)
    for _ in range(3):
        assert {o.request_id for o in llm.step()} <= {unborn}
    llm.abort(ended)
    llm.abort("nobody")
    found = {}
    while llm.has_unfinished_requests():
        found |= {o.request_id: o.outputs[0] for o in llm.step()}
    assert found[ended].finish_reason == "abort" and found[kept].finish_reason == "length"
    assert 0 < len(found[ended].token_ids) < 50
    assert found[ended].token_ids == whole[: len(found[ended].token_ids)]
    assert found[kept].token_ids == whole[:10]


def test_threads_share_an_engine(llm, expected):
    def run(order: list[int]) -> list[list[tuple]]:
        rounds = [
            llm.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order], use_tqdm=False)
            for _ in range(3)
        ]
        rounds += [[llm.generate(PROMPTS[i], PARAMS[i], use_tqdm=False)[0] for i in order]]
        return [exact(outputs) for outputs in rounds]

    def stream() -> list[list[int]]:
        return [[t for piece in llm.stream(IDS, SEEDED) for t in piece.token_ids] for _ in range(6)]

    (want,) = tokens(llm.generate(IDS, SEEDED, use_tqdm=False))
    with ThreadPoolExecutor(3) as pool:
        one, two, streamed = (
            pool.submit(run, [0, 1, 2, 3]),
            pool.submit(run, [3, 1, 0, 2]),
            pool.submit(stream),
        )
        assert all(found == expected for found in one.result())
        assert all(found == [expected[i] for i in (3, 1, 0, 2)] for found in two.result())
        assert streamed.result() == [want] * 6


# ---------------------------------------------------------------- an engine's life


def live_bytes() -> int:
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


@pytest.mark.parametrize("end", ["close", "del"])
def test_memory_comes_back(start, end):
    before = live_bytes()
    llm = start()
    llm.generate(IDS, GREEDY, use_tqdm=False)
    assert live_bytes() >= before + sum(x.nbytes for x in jax.tree.leaves(llm.engine._state.cache))
    if end == "close":
        llm.close()
        llm.close()
        with pytest.raises(RuntimeError, match="closed"):
            llm.generate(IDS, GREEDY)
        with pytest.raises(RuntimeError, match="closed"):
            llm.step()
    else:
        del llm
    assert live_bytes() == before


def test_closing_ends_what_runs(start):
    llm = start()
    llm.add_request(IDS, GREEDY)
    stream = llm.stream(IDS, replace(GREEDY, max_tokens=100))
    next(stream)
    llm.close()
    assert not llm.has_unfinished_requests()
    with pytest.raises(RuntimeError, match="closed"):
        next(stream)


def test_update_params(llm, start, tiny):
    other = jax.tree.map(lambda x: jnp.flip(x, 0), tiny.params)
    old = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    with LLM.from_params(tiny.config, other, **SIZES) as fresh:
        wanted = fresh.generate(PROMPTS, PARAMS, use_tqdm=False)
    compiled = llm.report()["compilations"]
    try:
        llm.update_params(other)
        new = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert all(a is b for a, b in zip(jax.tree.leaves(llm.params), jax.tree.leaves(other), strict=True))
    finally:
        llm.update_params(tiny.params)
    assert exact(new) == exact(wanted) != exact(old)
    assert [o.num_cached_tokens for o in new] == [0] * 4
    assert llm.report()["compilations"] == compiled


def test_update_params_is_refused(llm, tiny):
    id = llm.add_request(IDS, GREEDY)
    llm.step()
    with pytest.raises(RuntimeError, match="unfinished"):
        llm.update_params(tiny.params)
    llm.abort(id)
    llm.step()
    llm.update_params(tiny.params)
    shorter = replace(tiny.params, embed=tiny.params.embed[:-1])
    with pytest.raises(ValueError, match=r"embed is float32\[299, ?48\], expected float32\[300, ?48\]"):
        llm.update_params(shorter)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.params)
    with pytest.raises(ValueError, match="bfloat16"):
        llm.update_params(half)
    stop = tokens(llm.generate(IDS, GREEDY, use_tqdm=False))[0][2]
    llm.generate(IDS, replace(GREEDY, stop_token_ids=[stop]), use_tqdm=False)
    llm.update_params(tiny.params)  # allowed at once, though a step may be in flight behind a stop token


def test_compilations_are_counted(llm):
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    before = llm.report()["compilations"]
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert llm.report()["compilations"] == before
    jax.jit(lambda x: x * 3 + 0.125)(jnp.ones(7)).block_until_ready()
    assert llm.report()["compilations"] > before


def test_without_the_contract_greedy_tokens_agree(start, llm):
    prompts = [[i, i + 1, 2 * i] for i in range(3, 9)]
    want = tokens(llm.generate(prompts, GREEDY, use_tqdm=False))
    with start(reproducible=False) as fast:
        assert tokens(fast.generate(prompts, GREEDY, use_tqdm=False)) == want
        assert tokens(fast.generate(prompts[0], GREEDY, use_tqdm=False)) == want[:1]
        assert any(step.startswith("decode[1,") for step in fast.report()["steps"])


# ---------------------------------------------------------------- failures


@contextmanager
def disturbed(llm: LLM, monkeypatch: pytest.MonkeyPatch, after: Callable[[int], None]) -> Iterator[list[int]]:
    """Calls `after` with the number of each step once the device has consumed the step's arguments."""
    calls: list[int] = []
    run = llm.engine.programs.run

    def disturb(*arguments):
        result = run(*arguments)
        calls.append(len(calls))
        after(calls[-1])
        return result

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.programs, "run", disturb)
        yield calls


def fail(steps: set[int]) -> Callable[[int], None]:
    def after(step: int) -> None:
        if step in steps:
            raise jax.errors.JaxRuntimeError(f"INTERNAL: step {step} failed")

    return after


@pytest.mark.parametrize("steps", [{0}, {3}, {6}, {2, 3}, {1, 8}], ids=str)
def test_a_failed_step_does_not_change_the_tokens(llm, monkeypatch, expected, steps):
    with disturbed(llm, monkeypatch, fail(steps)) as calls:
        found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert exact(found) == expected
    assert len(calls) > max(steps)


def test_a_device_that_always_fails(start, monkeypatch, expected):
    llm = start()
    always, error = fail(set(range(100))), jax.errors.JaxRuntimeError
    with disturbed(llm, monkeypatch, always) as calls, pytest.raises(error, match="step 2 failed"):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert len(calls) == 3
    assert exact(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected  # it is back
    llm.close()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's own handler, which test runners replace."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(*steps: int) -> Callable[[int], None]:
    def after(step: int) -> None:
        for _ in range(steps.count(step)):
            signal.raise_signal(signal.SIGINT)

    return after


@pytest.mark.parametrize("steps", [(0,), (3,), (4, 4)], ids=["first step", "later", "twice in one step"])
def test_an_interrupt_leaves_a_usable_engine(llm, monkeypatch, ctrl_c, expected, steps):
    with disturbed(llm, monkeypatch, interrupt(*steps)) as calls, pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert len(calls) <= steps[0] + 4  # those of one dispatch
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not llm._session.tickets
    assert exact(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected


def test_an_interrupt_waits_until_the_books_are_in_order(llm, monkeypatch, ctrl_c, expected):
    release = llm.engine.tables.release

    def interrupted(tables, end):
        release(tables, end)
        signal.raise_signal(signal.SIGINT)  # the request still holds what the pool has taken back

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm.engine.tables, "release", interrupted)
        llm.generate(IDS, GREEDY, use_tqdm=False)
    assert llm.engine.tables.occupancy == 0
    assert exact(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected


def test_an_interrupted_stream_leaves_a_usable_engine(llm, monkeypatch, ctrl_c, expected):
    with disturbed(llm, monkeypatch, interrupt(2)), pytest.raises(KeyboardInterrupt):
        list(llm.stream(IDS, replace(GREEDY, max_tokens=100)))
    assert exact(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
