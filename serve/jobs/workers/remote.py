"""Engines in worker processes behind one `BatchEngine`, whatever system runs the processes.

Requests of a worker that is lost go to another: a request's tokens do not depend on the worker.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ....lora.request import LoRARequest
from ....sampling.params import SamplingParams
from ...host.streams import tell
from ...llm.input_processor import InputProcessor
from ...options.engine import EngineOptions
from ...text.outputs import RequestOutput
from ...text.tokenizer.tokenizer import Tokenizer
from .worker import WorkerInfo, WorkerLost, WorkerRequest

LOSSES = 5  # workers that may be lost in a row, without a finished request between them


class WorkerBackend(Protocol):
    """System that runs workers. Workers and futures are opaque objects of its own. `got` and `facts` raise
    WorkerLost if a worker is lost."""

    def start_worker(self) -> Any: ...

    def facts(self, worker: Any) -> WorkerInfo: ...

    def take(self, worker: Any, new: Sequence[WorkerRequest]) -> Any:
        """Return a future of the result of `Worker.take`."""
        ...

    def wait_any(self, futures: Sequence[Any]) -> Any:
        """Wait until one of the futures is done or has failed; return it."""
        ...

    def result(self, future: Any) -> list[RequestOutput]: ...

    def report(self, worker: Any, explained: bool) -> dict[str, Any]: ...

    def close(self) -> None:
        """End all workers."""
        ...


@dataclass
class WorkerHandle:
    worker: Any
    has: dict[str, WorkerRequest] = field(default_factory=dict)  # that were sent, by id
    new: list[WorkerRequest] = field(default_factory=list)  # to be sent
    future: Any = None  # of its current `take`
    is_known: bool = False  # its products and its realm are those of the first

    @property
    def load(self) -> int:
        return len(self.has) + len(self.new)


class WorkerPool:
    """Several workers as one engine: `add_request` assigns to the worker with the fewest requests, `step`
    waits for the first result.

    Raises RuntimeError if LOSSES workers are lost in a row, or if a worker's realm or products differ from
    those of the first.
    """

    def __init__(
        self, backend: WorkerBackend, count: int, tokenizer: Tokenizer | None, options: EngineOptions
    ):
        self._backend, self.tokenizer = backend, tokenizer
        self._handles = [WorkerHandle(backend.start_worker()) for _ in range(count)]
        try:
            self._facts = facts = backend.facts(self._handles[0].worker)
        except WorkerLost as gone:
            raise RuntimeError(f"no worker could be started: {gone}") from None
        ends, own = facts.eos_ids, facts.processors
        self._processor = InputProcessor(
            facts.vocab_size, facts.max_model_len, options, tokenizer, ends, processors=own
        )
        self.lost = self._in_a_row = 0

    @property
    def longest_prompt(self) -> int:
        return self._processor.longest

    def add_request(
        self,
        prompt: list[int],
        params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
    ) -> str:
        """Raises ValueError or TypeError for what no worker could run."""
        self._processor.group(request_id, prompt, params)
        self._deal(WorkerRequest(request_id, prompt, params, lora_request))
        return request_id

    def _deal(self, request: WorkerRequest) -> None:
        min(self._handles, key=lambda handle: handle.load).new.append(request)

    def expect(self, requests: int) -> None:
        """Do nothing: a worker's share of the requests is not known."""

    def step(self) -> list[RequestOutput]:
        """Return the outputs that have finished; none if a worker was lost, or its requests take longer."""
        for handle in self._handles:
            if handle.future is None and handle.load:
                handle.future = self._backend.take(handle.worker, handle.new)
                handle.has |= {request.id: request for request in handle.new}
                handle.new = []
        futures = [handle.future for handle in self._handles if handle.future is not None]
        if not futures:
            return []
        first = self._backend.wait_any(futures)
        handle = next(handle for handle in self._handles if handle.future is first)
        handle.future = None
        try:
            ended = self._backend.result(first)
            self._check(handle)
        except WorkerLost as gone:
            self._replace(handle, gone)
            return []
        for output in ended:
            del handle.has[output.request_id]
        self._in_a_row = 0 if ended else self._in_a_row
        return ended

    def _replace(self, handle: WorkerHandle, gone: WorkerLost) -> None:
        """Start another worker in the place of a lost one, and assign its requests again."""
        self.lost, self._in_a_row = self.lost + 1, self._in_a_row + 1
        if self._in_a_row > LOSSES:
            raise RuntimeError(f"{self._in_a_row} workers were lost, one after the other: {gone}")
        tell(f"duetto: a worker is lost ({gone}); another takes its place")
        requests = [*handle.has.values(), *handle.new]
        handle.worker, handle.has, handle.new, handle.is_known = self._backend.start_worker(), {}, [], False
        for request in requests:
            self._deal(request)

    def _check(self, handle: WorkerHandle) -> None:
        """Raise RuntimeError if bits may differ: an accelerator's compiler may choose otherwise, and the
        model's folder may have changed since the first worker's start."""
        if handle.is_known:
            return
        facts = self._backend.facts(handle.worker)
        if facts.products != self._facts.products:
            found = f"{facts.products}, the first one's {self._facts.products}"
            raise RuntimeError(f"a worker's products are {found}")
        if facts.realm != self._facts.realm:
            raise RuntimeError("a worker has other weights, versions or another machine than the first one")
        handle.is_known = True

    def report(self, explained: bool = False) -> dict[str, Any]:
        """Return the report of worker 0, with the numbers of workers and of lost ones."""
        about = {"workers": len(self._handles), "workers_lost": self.lost}
        try:
            return self._backend.report(self._handles[0].worker, explained) | about
        except WorkerLost:
            return about | {"products": self._facts.products}

    def save_cache(self, path: str) -> int:
        raise ValueError("save_cache is not allowed: the workers' caches are elsewhere")

    def close(self) -> None:
        self._processor.grammars.close()
        self._backend.close()
