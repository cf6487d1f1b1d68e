"""Room, places and ends of a service whose engine does what a test says."""

import asyncio
import json
import threading
import time
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from cases.text.letters import letters
from fakes.service import LLM, Driver, Processor, run, task
from tokenizers import AddedToken

from duetto import SamplingParams
from duetto.sampling.structured import StructuredOutputsParams
from duetto.serve.llm.driver import make_error_delivery
from duetto.serve.llm.mailbox import Delivery, SlowReaderError
from duetto.serve.llm.subscription import Subscription
from duetto.serve.server.routes.completions import COMPLETION_API, CompletionRoute
from duetto.serve.server.service.errors import HttpError
from duetto.serve.server.service.service import Service
from duetto.serve.text.openai.errors import RequestError
from duetto.serve.text.openai.replies import Replies
from duetto.serve.text.openai.tasks import Task
from duetto.serve.text.outputs import CompletionOutput


def pass_seconds(seconds: float, monkeypatch) -> None:
    """Put the clock of the loop forward, so that no test depends on how soon a machine does anything."""
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "time", lambda: time.monotonic() + seconds)


def test_waiting_requests_are_counted_with_all_completions(monkeypatch):
    async def test(service: Service, driver: Driver) -> None:
        with pytest.raises(HttpError, match="make 4 completions; 3 may wait"):
            async with service.open_call([task(), task(3)], service.admission.new_body()):
                pass
        async with service.open_call([task(2)], service.admission.new_body()):
            with pytest.raises(HttpError, match="2 completions wait already") as told:
                async with service.open_call([task(2)], service.admission.new_body()):
                    pass
            assert told.value.to_response().headers["retry-after"] == "1"
            driver.deliver(driver.begun[0])
            async with service.open_call([task(3)], service.admission.new_body()):
                assert len(driver.begun) == 2
        assert driver.left == driver.begun[::-1]

    run(test, monkeypatch, max_queued=3)


def test_a_client_that_fills_the_queue_leaves_others_their_share(monkeypatch):
    async def test(service: Service, driver: Driver) -> None:
        async def ask(client: str, n: int) -> None:
            await stack.enter_async_context(service.open_call([task(n)], service.admission.new_body(client)))

        async with AsyncExitStack() as stack:
            await ask("a", 4)
            await ask("b", 2)
            for client in ("a", "b"):
                with pytest.raises(HttpError, match="6 completions wait already"):
                    await ask(client, 1)
            await ask("c", 1)

    run(test, monkeypatch, max_queued=4)


def test_a_slow_reader_costs_others_nothing(monkeypatch):
    """Its last pieces, and those of another request, come with the same step."""

    async def test(service: Service, driver: Driver) -> None:
        async with (
            service.open_call([task()], service.admission.new_body()) as slow,
            service.open_call([task()], service.admission.new_body()) as other,
        ):
            (slow_one,), (other_one,) = slow.subscriptions, other.subscriptions
            with pytest.raises(SlowReaderError, match="5 tokens wait"):
                driver.deliver(slow_one, 5)
            slow.mailbox.put(make_error_delivery(slow.mailbox, slow_one, SlowReaderError("5 tokens wait")))
            driver.deliver(other_one, 3, at_end=True)
            assert [len(outputs) async for outputs in other.read_outputs()] == [1]
            news = slow.read_outputs()
            assert [output.token_ids for output in await anext(news)] == [[7] * 5]
            with pytest.raises(HttpError, match="5 tokens wait") as told:
                await anext(news)
            assert (told.value.status, told.value.code) == (503, "slow_reader")

    run(test, monkeypatch, max_stream_backlog=4)


def test_a_request_that_fails_ends_no_other(monkeypatch, capsys):
    async def test(service: Service, driver: Driver) -> None:
        async with (
            service.open_call([task()], service.admission.new_body()) as wrong,
            service.open_call([task()], service.admission.new_body()) as other,
        ):
            driver.deliver(wrong.subscriptions[0], 0, error=RuntimeError("boom"))
            driver.deliver(other.subscriptions[0], at_end=True)
            assert [len(outputs) async for outputs in other.read_outputs()] == [1]
            with pytest.raises(HttpError, match="the request has failed"):
                async for _ in wrong.read_outputs():
                    pass
        assert not service.ended.is_set() and "boom" in capsys.readouterr().err

    run(test, monkeypatch)


@pytest.mark.parametrize("is_stream", [True, False])
def test_nan_is_an_error_with_its_reason_and_no_traceback(monkeypatch, capsys, is_stream):
    """And what was generated before comes before it."""

    async def test(service: Service, driver: Driver) -> None:
        async with service.open_call([task(), task()], service.admission.new_body()) as wrong:
            for subscription in wrong.subscriptions:
                for token in (7, 8):
                    subscription.requests[0].append(token)
            wrong.subscriptions[0].requests[0].fail_with_nan()
            driver.deliver(wrong.subscriptions[0], 0, at_end=False)
            driver.readers[wrong.subscriptions[0]].put(
                Delivery(wrong.mailbox, wrong.subscriptions[0], [], True)
            )
            driver.deliver(wrong.subscriptions[1], 0, at_end=True)
            with pytest.raises(HttpError, match="the model computed NaN") as told:
                if is_stream:
                    news = wrong.read_outputs()
                    found = [(o.index, o.token_ids, o.finish_reason) for o in await anext(news)]
                    assert found == [(0, [7, 8], None), (1, [7, 8], "length")]
                    await anext(news)
                else:
                    await wrong.wait_end()
        assert (told.value.status, told.value.code) == (500, "nan_logits") and not capsys.readouterr().err

    run(test, monkeypatch)


def test_nothing_waits_for_an_engine_that_has_failed(monkeypatch, capsys):
    async def test(service: Service, driver: Driver) -> None:
        async with service.open_call([task()], service.admission.new_body()) as call:
            driver.failed(RuntimeError("boom"))
            with pytest.raises(HttpError, match="the engine has failed"):
                await anext(call.read_outputs())
            pass_seconds(31, monkeypatch)  # past the longest wait
            await asyncio.sleep(0.01)
        await service.ended.wait()
        with pytest.raises(HttpError, match="the server is ending"):
            async with service.open_call([task()], service.admission.new_body()):
                pass

    run(test, monkeypatch, queue_timeout=30.0)
    assert "RuntimeError: boom" in capsys.readouterr().err


def test_requests_that_wait_too_long_get_an_error(monkeypatch):
    async def test(service: Service, driver: Driver) -> None:
        async with service.open_call([task()], service.admission.new_body()) as call:
            pass_seconds(31, monkeypatch)
            with pytest.raises(HttpError, match="nothing was generated within 30 s") as told:
                await anext(call.read_outputs())
        assert told.value.status == 503 and driver.left == call.subscriptions

    run(test, monkeypatch, queue_timeout=30.0)


def test_a_resumed_answer_waits_for_its_first_token_too(monkeypatch):
    """Also if one of its completions has ended elsewhere."""

    def make(*given: Any, **more: Any) -> Subscription:
        made = Processor().make_subscription(*given, **more)
        made.requests[0].append_resumed_tokens([7] * 10)
        return made

    async def test(service: Service, driver: Driver) -> None:
        async with service.open_call([task(2)], service.admission.new_body()) as call:
            assert [(o.index, o.finish_reason) for o in call.resumed_outputs] == [(0, "length")]
            assert call.num_waiting == 2
            pass_seconds(31, monkeypatch)
            with pytest.raises(HttpError, match="nothing was generated within 30 s"):
                await anext(call.read_outputs())

    monkeypatch.setattr(LLM.input_processor, "make_subscription", make, raising=False)
    run(test, monkeypatch, queue_timeout=30.0)


def test_clients_with_keys_get_equal_shares(monkeypatch):
    async def test(service: Service, driver: Driver) -> None:
        async with (
            service.open_call([task()] * 5, service.admission.new_body("a")) as many,
            service.open_call([task()], service.admission.new_body("b")) as one,
            service.open_call([task()], service.admission.new_body()) as open,
        ):
            calls = (many, one, open)
            ranks = [[s.requests[0].priority for s in call.subscriptions] for call in calls]
            assert ranks == [[0, 13, 26, 39, 52], [0], [0]]
            driver.deliver(many.subscriptions[3])  # the clock is at its position, also for a new client
            async with service.open_call([task()], service.admission.new_body("c")) as late:
                assert late.requests[0].priority == 39

    run(test, monkeypatch)


def test_prompts_beside_one_that_is_refused_do_not_begin(monkeypatch):
    made: list[Any] = []

    def make(*given: Any, **more: Any) -> Subscription:
        if len(made) == 2:
            raise ValueError("too many")
        made.append(given)
        return Processor().make_subscription(*given, **more)

    async def test(service: Service, driver: Any) -> None:
        with pytest.raises(RequestError, match="too many"):
            async with service.open_call([task()] * 3, service.admission.new_body()):
                pass
        assert len(made) == 2 and not driver.begun and not service._calls

    monkeypatch.setattr(LLM.input_processor, "make_subscription", make, raising=False)
    run(test, monkeypatch)


def test_a_client_that_leaves_during_tokenization_begins_nothing(monkeypatch):
    reading, goes_on = threading.Event(), threading.Event()

    def make(*given: Any, **more: Any) -> Subscription:
        reading.set()
        goes_on.wait()
        return Processor().make_subscription(*given, **more)

    async def test(service: Service, driver: Any) -> None:
        call = service.open_call([task()], service.admission.new_body())
        coming = asyncio.ensure_future(call.__aenter__())
        await asyncio.to_thread(reading.wait)
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        goes_on.set()
        assert not driver.begun and not service._tokenizing

    monkeypatch.setattr(LLM.input_processor, "make_subscription", make, raising=False)
    run(test, monkeypatch)


class Compiling(Future[None]):
    """A grammar that is compiled when a test says so, and is released as often as requests leave it."""

    is_awaited, releases = False, 0

    def add_done_callback(self, fn: Any) -> None:
        super().add_done_callback(fn)
        self.is_awaited = True

    def release(self) -> None:
        self.releases += 1


@pytest.mark.parametrize("error", [None, ValueError("too deep")])
def test_tasks_become_requests_once_a_grammar_is_compiled(monkeypatch, error):
    grammar, adapter = Compiling(), SimpleNamespace(lora_name="tuned")
    job = SimpleNamespace(future=grammar, release=grammar.release)
    registry, grammars = SimpleNamespace(requests=[adapter]), SimpleNamespace(submit=lambda _: job)
    adapters: list[Any] = []

    class Noting(Processor):
        adapter_registry = registry

        def make_subscription(
            self, prompt: Any, params: Any, resumed_outputs: Any, lora_request: Any
        ) -> Subscription:
            adapters.append(lora_request)
            return super().make_subscription(prompt, params, resumed_outputs, lora_request)

    processor = Noting()
    processor.grammars = grammars
    monkeypatch.setattr(LLM, "input_processor", processor)
    constrained = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))

    async def test(service: Service, driver: Any) -> None:
        tasks = [task(), replace(task(), params=constrained, model="tuned")]
        call = service.open_call(tasks, service.admission.new_body())
        coming = asyncio.ensure_future(call.__aenter__())
        while not grammar.is_awaited:
            await asyncio.sleep(0.001)
        assert not adapters and not grammar.releases
        if error is None:
            grammar.set_result(None)
            assert (await coming).subscriptions == driver.begun and adapters == [None, adapter]
            await call.__aexit__(None, None, None)
        else:
            grammar.set_exception(error)
            with pytest.raises(RequestError, match="too deep"):
                await coming
        assert len(driver.begun) == len(adapters) == (2 if error is None else 0) and grammar.releases == 1

    run(test, monkeypatch)


def test_the_longest_wait_counts_from_the_arrival(monkeypatch):
    """Also while prompts are read."""

    goes_on = threading.Event()

    def make(*given: Any, **more: Any) -> Subscription:
        goes_on.wait()
        return Processor().make_subscription(*given, **more)

    async def test(service: Service, driver: Any) -> None:
        with pytest.raises(HttpError, match="within 0.05 s"):
            async with service.open_call([task()], service.admission.new_body()):
                pass
        goes_on.set()

    monkeypatch.setattr(LLM.input_processor, "make_subscription", make, raising=False)
    run(test, monkeypatch, queue_timeout=0.05)


def test_the_end_comes_when_all_calls_have_ended(monkeypatch):
    async def test(service: Service, driver: Driver) -> None:
        async with service.open_call([task()], service.admission.new_body()):
            service.start_draining()
            assert not service.ended.is_set()
        await service.ended.wait()

    run(test, monkeypatch)


@pytest.mark.parametrize("pauses_first", [True, False])
def test_the_end_does_not_wait_for_a_paused_engine(monkeypatch, pauses_first):
    async def test(service: Service, driver: Driver) -> None:
        async with service.open_call([task()], service.admission.new_body()) as call:
            driver.deliver(call.subscriptions[0])
            service.llm.is_sleeping = lambda: pauses_first
            service.start_draining()
            if not pauses_first:
                await service.change_engine(lambda: monkeypatch.setattr(LLM, "is_sleeping", lambda: True))
            with pytest.raises(HttpError, match="ending, and it is paused") as told:
                await call.wait_end()
            assert told.value.status == 503 and driver.left == call.subscriptions
        await service.ended.wait()
        with pytest.raises(HttpError, match="the server is ending"):
            async with service.open_call([task()], service.admission.new_body(), is_admitted=True):
                pass

    monkeypatch.setattr(LLM, "is_sleeping", LLM.is_sleeping)
    run(test, monkeypatch)


def test_a_request_of_several_parts_is_admitted_once(monkeypatch):
    """And the end waits for all of them, without room and between the parts too."""

    async def test(service: Service, driver: Driver) -> None:
        async with service.open_call([task(), task()], service.admission.new_body()):
            with service.count_call():
                async with service.open_call([task()], service.admission.new_body(), is_admitted=True):
                    service.start_draining()
                with pytest.raises(HttpError, match="ending"):
                    async with service.open_call([task()], service.admission.new_body()):
                        pass
                async with service.open_call([task()], service.admission.new_body(), is_admitted=True):
                    pass
        assert service.ended.is_set() and len(driver.begun) == 4

    run(test, monkeypatch, max_queued=2)


def test_chats_keep_special_tokens_that_mark_reasoning(monkeypatch):
    marks = [AddedToken(name, special=True) for name in ("[THINK]", "[/THINK]")]
    monkeypatch.setattr(LLM, "tokenizer", letters("[THINK][/THINK]", *marks))

    async def test(service: Service, driver: Driver) -> None:
        for form, skipped in (("chat", False), ("completion", True)):
            async with service.open_call([replace(task(), form=form)], service.admission.new_body()):
                assert LLM.input_processor.params.skip_special_tokens is skipped

    run(test, monkeypatch)


class BrokenReplies(Replies):
    """Cannot write a text of "x" behind the first one."""

    def completion_choice(self, output: CompletionOutput, task: Task) -> dict[str, Any]:
        choice = super().completion_choice(output, task)
        return choice | {"text": "\ud83d"} if output.token_ids == [2] else choice


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_stream_that_cannot_be_written_ends_with_an_error(monkeypatch, is_broken):
    """Its request ends in the engine, and the log gets the exception."""
    sent: list[dict[str, Any]] = []
    body = json.dumps({"prompt": [1, 2, 3], "stream": True}).encode()

    async def test(service: Service, driver: Driver) -> None:
        service.replies = BrokenReplies("m")
        monkeypatch.setattr(service, "answer_realm", SimpleNamespace(name_with_adapter=lambda adapter: ""))
        requests = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if not requests:
                await asyncio.Event().wait()
            return requests.pop()

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)
            if b"text" in message.get("body", b""):
                driver.begun[0].requests[0].append(2 if is_broken else 3)
                asyncio.get_running_loop().call_soon(driver.deliver, driver.begun[0], 0, not is_broken)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        asked = asyncio.ensure_future(CompletionRoute(service, COMPLETION_API)(scope, receive, send))
        while not driver.begun:
            await asyncio.sleep(0)
        driver.deliver(driver.begun[0])
        if is_broken:
            with pytest.raises(UnicodeEncodeError):
                await asked
            assert driver.left == driver.begun
        else:
            await asked

    run(test, monkeypatch)
    *_, last = sent
    assert last["more_body"] is False
    error = b'"code":"internal_error"'
    assert (error in last["body"]) is is_broken and (b"[DONE]" in last["body"]) is not is_broken
