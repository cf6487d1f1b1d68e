"""Streams, and asynchronous ones: the pieces are those of `generate`, and leaving one aborts it."""

import asyncio
from dataclasses import replace

import pytest
from cases.requests import GREEDY, IDS, PARAMS, PROMPTS, SEEDED, tokens

from duetto import SamplingParams

pytestmark = pytest.mark.usefixtures("nothing_is_left")


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


def test_a_stream_returns_tokens_of_other_callers_steps_first(llm):
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

    async def consume(begun: asyncio.Event) -> None:
        async for _ in llm.astream(IDS, long):
            begun.set()

    async def cancel() -> None:
        begun = asyncio.Event()
        task = asyncio.create_task(consume(begun))
        await begun.wait()
        assert llm.session.subscriptions
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert asyncio.run(leave()) > 0
    assert not llm.session.subscriptions
    asyncio.run(cancel())
    with pytest.raises(TypeError, match="a prompt is"):
        asyncio.run(anext(llm.astream(5)))
