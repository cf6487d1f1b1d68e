"""A replica of the simulated fleet: the real service, session and driver over a simulated engine, and as much
HTTP as the router's client speaks."""

import asyncio
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from starlette.responses import Response

from benchmarks.chaos.machine import Machine, audit
from benchmarks.chaos.simulated.device import BROKEN, VOCAB
from benchmarks.chaos.simulated.network import Network, SimulatedTransport
from benchmarks.chaos.simulated.world import Process
from duetto.sampling.params import SamplingParams
from duetto.serve.host.threads import OrderQueue
from duetto.serve.llm.driver import Driver, run_orders_and_step
from duetto.serve.llm.input_processor import InputProcessor
from duetto.serve.llm.session import Session
from duetto.serve.options.engine import EngineOptions
from duetto.serve.options.server import ServerOptions
from duetto.serve.server.routes.body import REALM_HEADER
from duetto.serve.server.routes.completions import COMPLETION_API, CompletionRoute
from duetto.serve.server.service.errors import answer_error
from duetto.serve.server.service.service import Service
from duetto.serve.text.grammar.constraint import Constraint

STEP = 0.03  # seconds of a step, at most
EOS = 7  # end token
BITS = -(-VOCAB // 32) * 32


def allowed(index: int, most: int) -> int:
    """Return the mask of a token under the grammar of `most` tokens: at index i those equal to i modulo 3,
    then the end token."""
    if index >= most:
        return 1 << EOS
    return sum(1 << token for token in range(VOCAB) if token % 3 == index % 3 and token != EOS)


class Matcher:
    """What `Constraint` asks of llguidance, for the grammar of `allowed`."""

    def __init__(self, most: int):
        self._most, self._taken, self._is_error = most, 0, False

    def try_consume_tokens(self, tokens: list[int]) -> int:
        for token in tokens:
            if not allowed(self._taken, self._most) >> token & 1 or token == EOS:
                self._is_error = True
                return 0
            self._taken += 1
        return len(tokens)

    def compute_bitmask(self) -> bytes:
        return allowed(self._taken, self._most).to_bytes(BITS // 8, "little")

    def is_error(self) -> bool:
        return self._is_error

    def is_accepting(self) -> bool:
        return self._taken >= self._most

    def is_stopped(self) -> bool:
        return self._is_error

    def get_error(self) -> str:
        return "the token is not allowed here" if self._is_error else ""


class ChaosProcessor(InputProcessor):
    """An input processor whose grammars are compiled at once: the `regex` is the number of tokens."""

    def make_constraint(self, params: SamplingParams, start: int) -> Constraint | None:
        if params.structured_outputs is None:
            return None
        matcher = Matcher(int(params.structured_outputs.regex or 0))
        first = np.frombuffer(matcher.compute_bitmask(), np.uint32)
        return Constraint(cast(Any, matcher), frozenset({EOS}), first, start)


class ChaosDriver(Driver):
    """A driver whose turns are events. Errors that are not the device's go to `errors`."""

    def __init__(self, machine: Machine, session: Session, *given: Any, **options: Any):
        self._machine, self._is_due = machine, False
        self._own = machine.engine
        super().__init__(session, *given, start_thread=self._started, **options)

    def _started(self, alive: Any, orders: OrderQueue) -> "ChaosDriver":
        self._alive, self._own_orders = alive, orders
        return self

    def join(self) -> None: ...

    def call_in_thread(self, work: Callable[[], Any]) -> None:
        super().call_in_thread(work)
        self._wake(0.0005)

    def _wake(self, seconds: float) -> None:
        if not self._is_due:
            self._is_due = True
            self._machine.loop.call_later(self._machine.random.random() * seconds, self._turn)

    def _turn(self) -> None:
        self._is_due = False
        is_busy = run_orders_and_step(self._alive, self._own_orders, wait=False)
        try:
            audit(self._own)
        except Exception as error:  # noqa: BLE001 - a violation ends the simulation
            self._machine.loop.errors.append(error)
        if is_busy or self._own_orders.qsize():
            self._wake(STEP)

    def fail_requests(self, error: Exception) -> None:
        if not isinstance(error, BROKEN):
            self._machine.loop.errors.append(error)
        super().fail_requests(error)


class ServerConnection(asyncio.Protocol):
    """One request of a connection, and its answer."""

    def __init__(self, process: Process, app: Callable[..., Any]):
        self._process, self._app, self._data, self._begun = process, app, b"", False
        self._left = asyncio.Event()
        self._transport: SimulatedTransport

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._left.set()

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        headers = [(name, value) for name, _, value in (line.partition(b": ") for line in lines[1:])]
        size = int(dict(headers).get(b"content-length", b"0")) if end else 0
        if end and len(body) >= size and not self._begun:
            self._begun = True
            method, path, _ = lines[0].decode().split(" ")
            scope = {"type": "http", "method": method, "path": path, "headers": headers}
            self._process.start(self._answer(scope, body))

    async def _answer(self, scope: dict[str, Any], body: bytes) -> None:
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await self._left.wait()
            return {"type": "http.disconnect"}

        await self._app(scope, receive, self._send)

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            named = dict(message.get("headers", ()))
            self._chunked = b"content-length" not in named
            lines = [b"HTTP/1.1 %d OK" % message["status"], *(b"%s: %s" % one for one in named.items())]
            lines += [b"transfer-encoding: chunked"] if self._chunked else []
            return self._transport.write(b"\r\n".join([*lines, b"", b""]))
        piece = message.get("body", b"")
        if piece:
            self._transport.write(b"%x\r\n%s\r\n" % (len(piece), piece) if self._chunked else piece)
        if not message.get("more_body"):
            self._transport.write(b"0\r\n\r\n" if self._chunked else b"")
            self._transport.close()


class ChaosReplica:
    """A server on a machine, at an address. `begin` starts its process, and again after its end."""

    def __init__(self, machine: Machine, network: Network):
        self.machine, self._network = machine, network
        self.host = machine.name
        self.address = f"http://{machine.name}:8000"
        self.service: Service

    def begin(self) -> None:
        process = self.machine.start()
        process.context.copy().run(self._build, process)
        self._network.listeners[self.host] = process, lambda: ServerConnection(process, self.app)

    def _build(self, process: Process) -> None:
        machine, engine = self.machine, self.machine.engine
        options = EngineOptions(page_size=1 << 6, max_prefill_delay=0.0)
        processor = ChaosProcessor(VOCAB, engine.sizes.max_model_len, options, None, (EOS,))
        processor.grammars = cast(Any, SimpleNamespace(submit=lambda shape: None))
        session = Session(engine)
        self.session = session
        llm: Any = SimpleNamespace(
            session=session,
            input_processor=processor,
            tokenizer=None,
            engine=engine,
            longest_prompt=engine.sizes.max_model_len - 1,
            is_sleeping=lambda: engine.is_sleeping,
        )

        limits = ServerOptions(max_queued=64, queue_timeout=30.0)
        self.service = Service(llm, limits, {}, make_driver=partial(ChaosDriver, machine))
        self._completions = CompletionRoute(self.service, COMPLETION_API)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            if scope["path"] == "/v1/completions":
                return await self._completions(scope, receive, send)
            response = self._state(scope["path"])
        except Exception as error:  # noqa: BLE001 - as the server's middleware
            response = await answer_error(cast(Any, None), error)
            if response.status_code == 500:
                self.machine.loop.errors.append(error)
        await response(scope, receive, send)

    def _state(self, path: str) -> Response:
        own = self.service
        if path == "/health":
            return Response(status_code=200 if own.error is None else 503)
        taken = not (own.error or own.is_draining)
        return Response(status_code=200 if taken else 503, headers={REALM_HEADER: own.answer_realm.name})
