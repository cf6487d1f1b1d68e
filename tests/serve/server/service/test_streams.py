"""What the engine's thread brings, for a reader who is quick, slow, or leaves."""

import asyncio
from contextlib import aclosing

import pytest

from duetto.serve.server.service.errors import HttpError
from duetto.serve.server.service.streams import ClientLeft, OutputStream, run_while_connected
from duetto.serve.text.outputs import CompletionOutput


def piece(text: str) -> CompletionOutput:
    return CompletionOutput(0, text, [])


def stream(left: list[str], most: int = 100) -> OutputStream:
    made = OutputStream(lambda: left.append("left"), most)
    made.num_unfinished = 1
    return made


def test_pieces_come_in_their_order_and_to_their_end():
    async def read() -> list[str]:
        own, found = stream(left), []
        own.put([piece("a"), piece("b")], False)
        asyncio.get_running_loop().call_soon(own.wake)  # for no reason
        asyncio.get_running_loop().call_later(0.01, own.put, [piece("c")], True)
        async for outputs in own.read_pieces():
            found.append("".join(one.text for one in outputs))
        return found

    left: list[str] = []
    assert asyncio.run(read()) == ["ab", "", "c"] and not left


def test_pieces_before_an_error_are_read_before_it():
    async def read() -> list[str]:
        own, found = stream(left), []
        own.put([piece("a")], False)
        own.fail(HttpError(500, "it is NaN", "nan_logits"))
        with pytest.raises(HttpError, match="NaN"):
            async for outputs in own.read_pieces():
                found += [one.text for one in outputs]
        return found

    left: list[str] = []
    assert asyncio.run(read()) == ["a"]


def test_slow_readers_are_aborted():
    async def read() -> None:
        own = stream(left, most=2)
        async with aclosing(own.read_pieces()) as pieces:
            own.put([piece("a")], False)
            assert await anext(pieces)
            own.put([piece("b"), piece("c"), piece("d")], False)
            with pytest.raises(HttpError, match="2 pieces wait to be read"):
                await anext(pieces)

    left: list[str] = []
    asyncio.run(read())
    assert "left" in left


def test_a_reader_that_stops_ends_the_request():
    async def read() -> None:
        own = stream(left)
        own.put([piece("a")], False)
        async with aclosing(own.read_pieces()) as pieces:
            await anext(pieces)

    left: list[str] = []
    asyncio.run(read())
    assert left == ["left"]


def test_work_is_cancelled_when_its_client_leaves():
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def receive() -> dict[str, str]:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def client() -> None:
        with pytest.raises(ClientLeft):
            await run_while_connected(receive, work())

    asyncio.run(client())
    assert ended
