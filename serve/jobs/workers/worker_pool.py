"""Engines in worker processes behind one `BatchEngine`. A `WorkerBackend` runs the processes.

Requests of a worker that is lost go to another: a request's tokens do not depend on the worker.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ....lora.request import LoRARequest
from ....sampling.params import SamplingParams
from ...host.streams import print_stderr
from ...llm.input_processor import InputProcessor, PromptInput
from ...options.engine import EngineOptions
from ...text.outputs import RequestOutput
from ...text.tokenizer.tokenizer import Tokenizer
from .worker import WorkerInfo, WorkerLost, WorkerRequest

MAX_LOSSES = 5  # workers that may be lost in a row, without a finished request between them


class WorkerBackend(Protocol):
    """System that runs workers. Workers and futures are opaque objects. `describe`, `result` and `report`
    raise WorkerLost if the worker's process is lost."""

    def start_worker(self) -> Any: ...

    def describe(self, worker: Any) -> WorkerInfo: ...

    def run_requests(self, worker: Any, requests: Sequence[WorkerRequest]) -> Any:
        """Call `Worker.run_requests` in a worker; return a future of its result."""
        ...

    def wait_any(self, futures: Sequence[Any]) -> Any:
        """Wait until one of the futures is done or has failed; return that future."""
        ...

    def result(self, future: Any) -> list[RequestOutput]: ...

    def report(self, worker: Any, explained: bool) -> dict[str, Any]: ...

    def close(self) -> None:
        """End all workers."""
        ...


@dataclass
class WorkerHandle:
    """A worker and its requests.

    sent: requests that were sent and have not finished, by id
    unsent: requests to send with the next `run_requests`
    future: result of the running `run_requests`; None while the worker is idle
    is_checked: its products and its realm have been compared with the first worker's
    """

    worker: Any
    sent: dict[str, WorkerRequest] = field(default_factory=dict)
    unsent: list[WorkerRequest] = field(default_factory=list)
    future: Any = None
    is_checked: bool = False

    @property
    def num_requests(self) -> int:
        return len(self.sent) + len(self.unsent)


class WorkerPool:
    """Several workers as one engine. `add_request` assigns a request to the worker with the fewest requests;
    `step` waits for the first result.

    Raises RuntimeError if more than `MAX_LOSSES` workers are lost in a row, or if a worker's realm or
    products differ from the first worker's.
    """

    def __init__(
        self, backend: WorkerBackend, count: int, tokenizer: Tokenizer | None, options: EngineOptions
    ):
        self._backend, self.tokenizer = backend, tokenizer
        self._handles = [WorkerHandle(backend.start_worker()) for _ in range(count)]
        try:
            self._info = info = backend.describe(self._handles[0].worker)
        except WorkerLost as gone:
            raise RuntimeError(f"no worker could be started: {gone}") from None
        eos_ids, processors = info.eos_ids, info.processors
        self._processor = InputProcessor(
            info.vocab_size,
            info.max_model_len,
            options,
            tokenizer,
            eos_ids,
            processors=processors,
            has_head=info.has_head,
        )
        self.num_lost = self._losses_in_a_row = 0

    @property
    def longest_prompt(self) -> int:
        return self._processor.longest_prompt

    def add_request(
        self,
        prompt: PromptInput,
        params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
    ) -> str:
        """Check a request and assign it to a worker. Raises ValueError or TypeError for a wrong request."""
        self._processor.make_subscription(prompt, params)
        self._assign(WorkerRequest(request_id, prompt, params, lora_request))
        return request_id

    def _assign(self, request: WorkerRequest) -> None:
        min(self._handles, key=lambda handle: handle.num_requests).unsent.append(request)

    def expect(self, requests: int) -> None:
        """Do nothing: a worker's share of the requests is not known."""

    def step(self) -> list[RequestOutput]:
        """Send new requests, wait for one worker, and return its finished outputs. The list is empty if the
        worker was lost, or if none of its requests has finished."""
        for handle in self._handles:
            if handle.future is None and handle.num_requests:
                handle.future = self._backend.run_requests(handle.worker, handle.unsent)
                handle.sent |= {request.id: request for request in handle.unsent}
                handle.unsent = []
        futures = [handle.future for handle in self._handles if handle.future is not None]
        if not futures:
            return []
        done = self._backend.wait_any(futures)
        handle = next(handle for handle in self._handles if handle.future is done)
        handle.future = None
        try:
            outputs = self._backend.result(done)
            self._check_matches_first(handle)
        except WorkerLost as gone:
            self._replace_worker(handle, gone)
            return []
        for output in outputs:
            del handle.sent[output.request_id]
        self._losses_in_a_row = 0 if outputs else self._losses_in_a_row
        return outputs

    def _replace_worker(self, handle: WorkerHandle, lost: WorkerLost) -> None:
        """Start a worker in place of a lost one, and assign the lost worker's requests again."""
        self.num_lost, self._losses_in_a_row = self.num_lost + 1, self._losses_in_a_row + 1
        if self._losses_in_a_row > MAX_LOSSES:
            raise RuntimeError(f"{self._losses_in_a_row} workers were lost, one after the other: {lost}")
        print_stderr(f"duetto: a worker is lost ({lost}); another takes its place")
        requests = [*handle.sent.values(), *handle.unsent]
        handle.worker, handle.is_checked = self._backend.start_worker(), False
        handle.sent, handle.unsent = {}, []
        for request in requests:
            self._assign(request)

    def _check_matches_first(self, handle: WorkerHandle) -> None:
        """Raise RuntimeError if this worker's bits may differ from the first worker's. Its compiler may have
        chosen other products, and the model's folder may have changed in between."""
        if handle.is_checked:
            return
        info = self._backend.describe(handle.worker)
        if info.products != self._info.products:
            products = f"{info.products}, the first one's {self._info.products}"
            raise RuntimeError(f"a worker's products are {products}")
        if info.realm != self._info.realm:
            raise RuntimeError("a worker has other weights, versions or another machine than the first one")
        handle.is_checked = True

    def report(self, explained: bool = False) -> dict[str, Any]:
        """Return the report of the first worker, with the number of workers and of losses."""
        about = {"workers": len(self._handles), "workers_lost": self.num_lost}
        try:
            return self._backend.report(self._handles[0].worker, explained) | about
        except WorkerLost:
            return about | {"products": self._info.products}

    def save_cache(self, path: str) -> int:
        raise ValueError("save_cache is not allowed: the workers' caches are elsewhere")

    def close(self) -> None:
        self._processor.grammars.close()
        self._backend.close()
