"""A service whose engine does what a test says."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from fakes.engine import ask

from duetto import SamplingParams
from duetto.serve.llm.mailbox import Delivery
from duetto.serve.llm.subscription import Subscription
from duetto.serve.options.server import ServerOptions
from duetto.serve.server.service import service as services
from duetto.serve.server.service.service import Service
from duetto.serve.text.openai.tasks import Task


class Processor:
    """Makes subscriptions that no engine runs."""

    adapter_registry: Any = None
    grammars: Any = None

    def make_subscription(
        self, prompt: Any, params: Any, resumed_outputs: Any, lora_request: Any
    ) -> Subscription:
        self.params = params
        return Subscription([ask([1, 2, 3], max_tokens=10) for _ in range(params.n)])


class Driver:
    """Notes what it is told."""

    def __init__(self, session: Any, on_failure: Any):
        self.failed = on_failure
        self.begun: list[Subscription] = []
        self.left: list[Subscription] = []
        self.readers: dict[Subscription, Any] = {}
        self.drop = self.left.append

    def submit(self, subscription: Subscription, reader: Any) -> None:
        self.begun.append(subscription)
        self.readers[subscription] = reader

    def deliver(self, subscription: Subscription, count: int = 1, at_end: bool = False, **more: Any) -> None:
        """A step that gives each completion `count` tokens."""
        for request in subscription.requests:
            for _ in range(count):
                request.append(7)
            if at_end:
                request.finish("length")
        reader = self.readers[subscription]
        outputs = [] if more else reader.collect(subscription)
        if outputs or at_end or more:
            reader.put(Delivery(reader, subscription, outputs, at_end or bool(more), **more))

    def wake(self) -> None:
        """Bring the tokens of steps before, once the reader waits."""
        for subscription in self.begun:
            if not subscription.is_finished:
                asyncio.get_running_loop().call_soon(self.deliver, subscription, 0)

    def stop(self) -> None:
        """Nothing runs."""


LLM = SimpleNamespace(
    tokenizer=None,
    longest_prompt=100,
    engine=SimpleNamespace(sizes=SimpleNamespace(max_model_len=100)),
    session=None,
    input_processor=Processor(),
    is_sleeping=lambda: False,
)


def task(n: int = 1) -> Task:
    return Task("completion", None, SamplingParams(n=n, max_tokens=10), prompt=[1, 2, 3])


def run(test: Callable[[Service, Driver], Awaitable[None]], monkeypatch, **options: Any) -> None:
    monkeypatch.setattr(services, "set_answer_realm", lambda *_: None)

    async def served() -> None:
        service: Any = Service(LLM, ServerOptions(**options), {}, make_driver=Driver)
        await asyncio.wait_for(test(service, service._driver), 60)
        await service.close()

    asyncio.run(served())
