"""Room, places and ends of a service whose engine does what a test says."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from cases.text.letters import letters
from tokenizers import AddedToken

from duetto import SamplingParams
from duetto.serve.llm.driver import StreamChunk
from duetto.serve.options.server import ServerOptions
from duetto.serve.server.service import preparing
from duetto.serve.server.service import service as services
from duetto.serve.server.service.errors import HttpError
from duetto.serve.server.service.service import Service
from duetto.serve.text.openai.errors import RequestError
from duetto.serve.text.openai.tasks import Task
from duetto.serve.text.outputs import CompletionOutput


class Flow:
    prompt, cached_tokens, known = (1, 2, 3), 0, ()

    def __init__(self):
        self.priority = 0

    def rank(self, priority: int, source: str | None = None) -> None:
        self.priority = priority


class Driver:
    """Notes what it is told."""

    def __init__(self, session: Any, deliver: Any, failed: Any):
        self.deliver, self.failed = deliver, failed
        self.begun: list[Any] = []
        self.left: list[Any] = []
        self.begin, self.leave = self.begun.append, self.left.append

    def flow(self, session: Any, processor: Any, prompt: Any, params: Any, known: Any, adapter: Any) -> Flow:
        self.params = params
        return Flow()

    def wake(self) -> None:
        """Nothing sleeps."""

    def stop(self) -> None:
        """Nothing runs."""


LLM = SimpleNamespace(
    tokenizer=None,
    longest_prompt=100,
    engine=SimpleNamespace(sizes=SimpleNamespace(max_model_len=100)),
    session=None,
    input_processor=SimpleNamespace(adapters=None, grammars=None),
    is_sleeping=lambda: False,
)


def task(n: int = 1) -> Task:
    return Task("completion", None, SamplingParams(n=n, max_tokens=10), prompt=[1, 2, 3])


def piece(flow: Any, count: int = 1, at_end: bool = False) -> StreamChunk:
    return StreamChunk(flow, [CompletionOutput(0, "x", [1]) for _ in range(count)], at_end)


def run(test: Callable[[Service, Driver], Awaitable[None]], monkeypatch, **options: Any) -> None:
    monkeypatch.setattr(services, "realms_of", lambda *_: None)

    async def served() -> None:
        service: Any = Service(LLM, ServerOptions(**options), {}, driver=Driver)
        monkeypatch.setattr(preparing, "StreamHandle", lambda *given: service._driver.flow(*given))
        await asyncio.wait_for(test(service, service._driver), 60)
        await service.close()

    asyncio.run(served())


def pass_seconds(seconds: float, monkeypatch) -> None:
    """Put the clock of the loop forward, so that no test depends on how soon a machine does anything."""
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "time", lambda: time.monotonic() + seconds)


def test_those_that_wait_are_counted_with_all_their_completions(monkeypatch):
    async def test(service: Service, driver: Driver) -> None:
        with pytest.raises(HttpError, match="make 4 completions; 3 may wait"):
            async with service.call([task(), task(3)], ""):
                pass
        async with service.call([task(2)], ""):
            with pytest.raises(HttpError, match="2 completions wait already") as told:
                async with service.call([task(2)], ""):
                    pass
            assert told.value.response().headers["retry-after"] == "1"
            driver.deliver([piece(driver.begun[0])])
            await asyncio.sleep(0)
            async with service.call([task(3)], ""):
                assert len(driver.begun) == 2
        assert driver.left == driver.begun[::-1]

    run(test, monkeypatch, max_queued=3)


def test_a_slow_reader_costs_others_nothing(monkeypatch):
    """Its last pieces, and those of another request, come with the same step."""

    async def test(service: Service, driver: Driver) -> None:
        async with service.call([task()], "") as slow, service.call([task()], "") as other:
            driver.deliver([piece(slow.flows[0], 5, at_end=True), piece(other.flows[0], at_end=True)])
            assert [len(outputs) async for outputs in other.stream.pieces()] == [1]
            with pytest.raises(HttpError, match="4 pieces wait"):
                await anext(slow.stream.pieces())

    run(test, monkeypatch, max_stream_backlog=4)


def test_a_request_that_fails_ends_no_other(monkeypatch, capsys):
    async def test(service: Service, driver: Driver) -> None:
        async with service.call([task()], "") as wrong, service.call([task()], "") as other:
            failed = StreamChunk(wrong.flows[0], [], True, RuntimeError("boom"))
            driver.deliver([failed, piece(other.flows[0], at_end=True)])
            assert [len(outputs) async for outputs in other.stream.pieces()] == [1]
            with pytest.raises(HttpError, match="the request has failed"):
                await anext(wrong.stream.pieces())
        assert not service.ended.is_set() and "boom" in capsys.readouterr().err

    run(test, monkeypatch)


def test_nothing_waits_for_an_engine_that_has_failed(monkeypatch, capsys):
    async def test(service: Service, driver: Driver) -> None:
        async with service.call([task()], "") as call:
            driver.failed(RuntimeError("boom"), [])
            with pytest.raises(HttpError, match="the engine has failed"):
                await anext(call.stream.pieces())
            pass_seconds(31, monkeypatch)  # past the longest wait
            await asyncio.sleep(0.01)
        await service.ended.wait()
        with pytest.raises(HttpError, match="the server is ending"):
            async with service.call([task()], ""):
                pass

    run(test, monkeypatch, queue_timeout=30.0)
    assert "RuntimeError: boom" in capsys.readouterr().err


def test_who_waits_too_long_is_told(monkeypatch):
    async def test(service: Service, driver: Driver) -> None:
        async with service.call([task()], "") as call:
            pass_seconds(31, monkeypatch)
            with pytest.raises(HttpError, match="nothing was generated within 30 s") as told:
                await anext(call.stream.pieces())
        assert told.value.status == 503 and driver.left == call.flows

    run(test, monkeypatch, queue_timeout=30.0)


def test_clients_with_keys_get_equal_shares(monkeypatch):
    async def test(service: Service, driver: Driver) -> None:
        async with (
            service.call([task()] * 5, "a") as many,
            service.call([task()], "b") as one,
            service.call([task()], "") as open,
        ):
            ranks: Any = [call.flows for call in (many, one, open)]
            assert [[flow.priority for flow in flows] for flows in ranks] == [[0, 13, 26, 39, 52], [0], [0]]

    run(test, monkeypatch)


def test_prompts_beside_one_that_is_refused_are_forgotten(monkeypatch):
    """Or their ids would be taken for ever."""

    async def test(service: Service, driver: Any) -> None:
        makes = iter([Flow, Flow])
        driver.flow = lambda *given: next(makes, refuse)()
        with pytest.raises(RequestError, match="too many"):
            async with service.call([task()] * 3, ""):
                pass
        assert len(driver.left) == 2 and not driver.begun

    run(test, monkeypatch)


def refuse() -> Flow:
    raise ValueError("too many")


def test_a_client_that_leaves_while_prompts_are_read_keeps_no_ids(monkeypatch):
    async def test(service: Service, driver: Any) -> None:
        reading, goes_on = threading.Event(), threading.Event()

        def flow(*given: Any) -> Flow:
            reading.set()
            goes_on.wait()
            return Flow()

        driver.flow = flow
        call = service.call([task()], "")
        coming = asyncio.ensure_future(call.__aenter__())
        await asyncio.to_thread(reading.wait)
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        goes_on.set()
        while not driver.left:
            await asyncio.sleep(0.001)
        assert not driver.begun and not service._coming

    run(test, monkeypatch)


def test_the_longest_wait_counts_from_the_arrival(monkeypatch):
    """Also while prompts are read."""

    async def test(service: Service, driver: Any) -> None:
        goes_on = threading.Event()

        def flow(*given: Any) -> Flow:
            goes_on.wait()
            return Flow()

        driver.flow = flow
        with pytest.raises(HttpError, match="within 0.05 s"):
            async with service.call([task()], ""):
                pass
        goes_on.set()

    run(test, monkeypatch, queue_timeout=0.05)


def test_the_end_comes_when_all_calls_have_ended(monkeypatch):
    async def test(service: Service, driver: Driver) -> None:
        async with service.call([task()], ""):
            service.drain()
            assert not service.ended.is_set()
        await service.ended.wait()

    run(test, monkeypatch)


@pytest.mark.parametrize("pauses_first", [True, False])
def test_the_end_does_not_wait_for_a_paused_engine(monkeypatch, pauses_first):
    async def test(service: Service, driver: Driver) -> None:
        async with service.call([task()], "") as call:
            driver.deliver([piece(call.flows[0])])
            await asyncio.sleep(0)
            service.llm.is_sleeping = lambda: pauses_first
            service.drain()
            if not pauses_first:
                await service.change(lambda: monkeypatch.setattr(LLM, "is_sleeping", lambda: True))
            with pytest.raises(HttpError, match="ending, and it is paused") as told:
                await call.stream.ended()
            assert told.value.status == 503 and driver.left == call.flows
        await service.ended.wait()
        with pytest.raises(HttpError, match="the server is ending"):
            async with service.call([task()], "", is_admitted=True):
                pass

    monkeypatch.setattr(LLM, "is_sleeping", LLM.is_sleeping)
    run(test, monkeypatch)


def test_a_request_of_several_parts_is_admitted_once(monkeypatch):
    """And the end waits for all of them, without room and between the parts too."""

    async def test(service: Service, driver: Driver) -> None:
        async with service.call([task(), task()], ""):
            with service.under_way():
                async with service.call([task()], "", is_admitted=True):
                    service.drain()
                with pytest.raises(HttpError, match="ending"):
                    async with service.call([task()], ""):
                        pass
                async with service.call([task()], "", is_admitted=True):
                    pass
        assert service.ended.is_set() and len(driver.begun) == 4

    run(test, monkeypatch, max_queued=2)


def test_the_text_of_a_chat_keeps_special_tokens_that_mark_reasoning(monkeypatch):
    marks = [AddedToken(name, special=True) for name in ("[THINK]", "[/THINK]")]
    monkeypatch.setattr(LLM, "tokenizer", letters("[THINK][/THINK]", *marks))

    async def test(service: Service, driver: Driver) -> None:
        for form, skipped in (("chat", False), ("completion", True)):
            async with service.call([replace(task(), form=form)], ""):
                assert driver.params.skip_special_tokens is skipped

    run(test, monkeypatch)
