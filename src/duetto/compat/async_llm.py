"""`AsyncLLM`: an `LLM` for an event loop, with vLLM's names and order of arguments."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable
from contextlib import aclosing, closing
from functools import partial
from typing import Any, Literal

from ..lora.request import LoRARequest
from ..sampling.params import SamplingParams
from ..serve.host.threads import Gate, in_threads
from ..serve.llm.intake import InputProcessor, Prompt
from ..serve.llm.llm import LLM
from ..serve.llm.ticket import RequestGroup
from ..serve.llm.vllm import check_all
from ..serve.text.outputs import RequestOutput
from .progress import Progress


def awaited(name: str) -> Callable[..., Awaitable[Any]]:
    """A method of `LLM` that runs in a worker thread."""

    async def method(self: "AsyncLLM", *args: Any, **given: Any) -> Any:
        return await asyncio.to_thread(getattr(self.llm, name), *args, **given)

    return method


class AsyncLLM:
    """Requests run in worker threads while the event loop goes on; as many as are iterated share the engine's
    steps."""

    def __init__(self, llm: LLM):
        self.llm = llm
        self._gate = Gate()

    @classmethod
    def from_engine_args(cls, engine_args: Any, *unused: Any, **ignored: Any) -> "AsyncLLM":
        """An engine of the keywords that an `EngineArgs` holds; arguments about logs and workers are without
        effect."""
        return cls(LLM.from_engine_args(engine_args))

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Any = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput]:
        """Reports of a request, as its `output_kind` says, up to its end. Closing or cancelling it aborts the
        request."""
        check_all(tokenization_kwargs=tokenization_kwargs)
        start = partial(self._reports, prompt, sampling_params, request_id, priority, lora_request)
        async with aclosing(in_threads(start, self._gate)) as reports:
            async for report in reports:
                yield report

    def _reports(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        priority: int,
        adapter: LoRARequest | None,
    ) -> Generator[RequestOutput]:
        (ticket,) = self.llm._tickets([prompt], params, priority, request_id, adapters=adapter)
        pieces = self.llm._session.stream(ticket)
        return reported(pieces, ticket, self.llm._intake, Progress(params.output_kind))

    sleep, wake_up, is_sleeping = awaited("sleep"), awaited("wake_up"), awaited("is_sleeping")
    reset_prefix_cache = awaited("reset_prefix_cache")
    start_profile, stop_profile = awaited("start_profile"), awaited("stop_profile")

    async def pause_generation(self, *, mode: Literal["keep"] = "keep", **ignored: Any) -> None:
        """Take no more steps until `resume_generation`. Raises ValueError for a mode that ends the requests:
        `abort` does."""
        if mode != "keep":
            raise ValueError(f"mode={mode!r} is not supported: only 'keep'")
        await self._gate.close()

    async def resume_generation(self) -> None:
        self._gate.open()

    async def is_paused(self) -> bool:
        return not self._gate.is_open

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """End requests now. Unknown ids are ignored."""
        for id in [request_id] if isinstance(request_id, str) else request_id:
            await asyncio.to_thread(self.llm.abort, id)

    def shutdown(self, timeout: float | None = None) -> None:
        """Abort what runs and free the device's memory."""
        self.llm.close()

    def __getattr__(self, name: str) -> Any:
        if name == "llm":
            raise AttributeError(name)
        return getattr(self.llm, name)


def reported(
    pieces: Generator[Any], ticket: RequestGroup, intake: InputProcessor, progress: Progress
) -> Generator[RequestOutput]:
    """Reports of a request that begins with the first."""
    with closing(pieces):
        for _ in pieces:
            if report := progress.take(ticket, intake):
                yield report


AsyncLLMEngine = AsyncLLM
