"""One thread that drives an engine for an event loop: requests go in through a queue, and what a step has
brought for all of them comes out in one call."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ...checkpoints.adapters.adapter import Adapter
from ...lora.request import LoRARequest
from ...model.pooling import PoolingParams
from ...sampling.params import SamplingParams
from ...sampling.structured import StructuredOutputsParams
from ..engine.lora.registry import Registry
from ..host.threads import Orders, obey
from ..text.grammar.grammars import CompileJob
from ..text.outputs import CompletionOutput, RequestOutput
from .intake import InputProcessor, Prompt
from .llm import LLM
from .tasks.embedding import embedding_of, making
from .ticket import RequestGroup, StreamCursor


class StreamHandle:
    """A request on its way through the driver, and how far it has been given out."""

    def __init__(self, ticket: RequestGroup, intake: InputProcessor):
        self.ticket = ticket
        self._intake, self._cursor = intake, StreamCursor(ticket)
        self._given = Counter[int]()  # tokens of each completion
        self.known = self.take()  # what its completions had before they came here

    @property
    def at_end(self) -> bool:
        return self._cursor.at_end

    @property
    def prompt(self) -> list[int]:
        return self.ticket.requests[0].prompt

    def rank(self, priority: int, source: str | None = None) -> None:
        """Its place in every queue, before it begins: smaller ones go first; and the address of the engine
        that computes its prompt, of several."""
        for request in self.ticket.requests:
            request.priority, request.source = priority, source

    @property
    def adapter(self) -> Adapter | None:
        return self.ticket.requests[0].adapter

    @property
    def cached_tokens(self) -> int:
        return self.ticket.requests[0].cached

    @property
    def embedding(self) -> np.ndarray:
        """Of its prompt, once it is at its end."""
        return embedding_of(self.ticket)

    def take(self) -> list[CompletionOutput]:
        """What is new of each completion: text, tokens and their log-probabilities; the last of one has its
        reason to end."""
        found = []
        for delta in self._cursor.take():
            request, start = self.ticket.requests[delta.index], self._given[delta.index]
            found.append(self._intake.since(delta, request, start))
            self._given[delta.index] += len(delta.token_ids)
        return found


class StreamChunk(NamedTuple):
    """What a step has brought for a flow, and whether that was all."""

    flow: StreamHandle
    outputs: list[CompletionOutput]
    at_end: bool


class Driver:
    """Drives an LLM's engine in a thread of its own. `deliver` is called there, after each step that has
    brought something; `failed` once, if the engine raises what it cannot mend: then the thread ends.

    The methods may be called from any thread. `flow` tokenizes; `begin` and `leave` wait for nothing.
    """

    def __init__(
        self, llm: LLM, deliver: Callable[[Sequence[StreamChunk]], None], failed: Callable[[Exception], None]
    ):
        self._llm, self._session = llm, llm._session
        self._deliver, self._failed = deliver, failed
        self._orders = Orders()
        self._flows: dict[str, StreamHandle] = {}  # under way
        self._thread = threading.Thread(target=self._run, name="duetto-engine", daemon=True)
        self._thread.start()

    def flow(
        self,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        known: Sequence[Sequence[int]] = (),
        adapter: LoRARequest | None = None,
    ) -> StreamHandle:
        """A checked request, to generate or to be embedded; tokens of its completions may be `known`. Raises
        ValueError or TypeError, naming what is wrong."""
        if isinstance(params, PoolingParams):
            make = making(self._llm, prompt, params)
        else:
            make = partial(self._llm._intake.ticket, prompt=prompt, params=params, known=known)
        (ticket,) = self._session.tickets_of([partial(make, lora_request=adapter)])
        return StreamHandle(ticket, self._llm._intake)

    @property
    def adapters(self) -> Registry | None:
        """Those that requests may name; None where none are served."""
        return self._llm._intake.adapters

    def load_adapter(self, name: str, path: str) -> None:
        """Read an adapter and serve it under a name, where adapters are served. Raises CheckpointError."""
        assert self.adapters is not None
        self.adapters.load(LoRARequest(name, self.adapters.next_id(), path))

    def unload_adapter(self, name: str) -> None:
        """Serve an adapter no longer, where adapters are served. Raises ValueError for an unknown name."""
        assert self.adapters is not None
        self.adapters.unload(name)

    def wanted(self, asked: StructuredOutputsParams) -> CompileJob:
        """The grammar that a flow waits for. Raises ValueError for what is no grammar."""
        return self._llm._intake.grammars.wanted(asked)

    def begin(self, flow: StreamHandle) -> None:
        self._orders.put(lambda: self._begin(flow))

    def leave(self, flow: StreamHandle) -> None:
        """Nobody wants the rest: it ends before the next step."""
        self._orders.put(lambda: self._leave(flow))

    def output(self, flow: StreamHandle) -> RequestOutput:
        """The whole result of a flow that is at its end."""
        return self._llm._intake.output(flow.ticket)

    def wake(self) -> None:
        """Look again at what there is to do: the engine was paused or resumed, or requests were ended."""
        self._orders.put(lambda: None)

    def stop(self) -> None:
        """End the thread after the step under way."""
        self._orders.put(None)
        self._thread.join()

    # ------------------------------------------------------------ in the thread

    @property
    def _is_busy(self) -> bool:
        engine = self._session.engine
        return bool(self._flows or engine.has_work) and not engine.is_sleeping

    def _begin(self, flow: StreamHandle) -> None:
        self._flows[flow.ticket.id] = flow
        self._session.submit([flow.ticket])

    def _leave(self, flow: StreamHandle) -> None:
        self._flows.pop(flow.ticket.id, None)
        self._session.drop([flow.ticket])

    def _run(self) -> None:
        try:
            while obey(self._orders, wait=not self._is_busy):
                with self._session.turn():
                    if (engine := self._session.engine).has_work and not engine.is_sleeping:
                        engine.step()
                    taken = [(flow, flow.take()) for flow in self._flows.values()]
                pieces = [StreamChunk(flow, new, flow.at_end) for flow, new in taken if new]
                for piece in pieces:
                    if piece.at_end:
                        self._leave(piece.flow)
                if pieces:
                    self._deliver(pieces)
        except Exception as error:  # noqa: BLE001 - whatever it is, somebody waits for answers
            self._failed(error)
