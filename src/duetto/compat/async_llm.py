"""`AsyncLLM`: an `LLM` for an event loop, with vLLM's names and order of arguments."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from functools import partial
from typing import Any, Literal

from ..lora.request import LoRARequest
from ..sampling.params import SamplingParams
from ..serve.llm.input_processor import Prompt
from ..serve.llm.llm import LLM
from ..serve.llm.request_group import RequestGroup
from ..serve.llm.vllm import check_all
from ..serve.text.outputs import RequestOutput
from .llm_engine import EngineModelConfig
from .progress import Progress


def awaited(name: str) -> Callable[..., Awaitable[Any]]:
    """A method of `LLM` that runs in a worker thread."""

    async def method(self: "AsyncLLM", *args: Any, **given: Any) -> Any:
        return await asyncio.to_thread(getattr(self.llm, name), *args, **given)

    return method


class AsyncLLM:
    """Requests of one or several event loops; a thread takes the engine's steps for all of them."""

    def __init__(self, llm: LLM):
        self.llm = llm

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
        """Reports of a request, as its `output_kind` says, up to its end; a caller that is slower than the
        steps gets those of several as one. Closing or cancelling it aborts the request."""
        check_all(tokenization_kwargs=tokenization_kwargs)
        session, processor = self.llm.session, self.llm.input_processor
        progress = Progress(sampling_params.output_kind)

        def make() -> RequestGroup:
            makes = processor.makes([prompt], sampling_params, priority, lora_request)
            return session.groups_of(makes, request_id)[0]

        def take(group: RequestGroup) -> list[RequestOutput]:
            return [] if (report := progress.take(group, processor)) is None else [report]

        async with aclosing(self.llm.async_driver.stream(make, partial(partial, take))) as reports:
            async for report in reports:
                yield report

    sleep, wake_up, is_sleeping = awaited("sleep"), awaited("wake_up"), awaited("is_sleeping")
    reset_prefix_cache = awaited("reset_prefix_cache")
    start_profile, stop_profile = awaited("start_profile"), awaited("stop_profile")

    async def pause_generation(self, *, mode: Literal["keep"] = "keep", **ignored: Any) -> None:
        """Take no more steps until `resume_generation`. Raises ValueError for a mode that ends the requests:
        `abort` does."""
        if mode != "keep":
            raise ValueError(f"mode={mode!r} is not supported: only 'keep'")
        await asyncio.to_thread(self.llm.async_driver.pause)

    async def resume_generation(self) -> None:
        self.llm.async_driver.resume()

    async def is_paused(self) -> bool:
        return not self.llm.async_driver.is_open

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """End requests now. Unknown ids are ignored."""
        for id in [request_id] if isinstance(request_id, str) else request_id:
            await asyncio.to_thread(self.llm.abort, id)

    @property
    def model_config(self) -> EngineModelConfig:
        return EngineModelConfig(self.llm)

    def shutdown(self, timeout: float | None = None) -> None:
        """Abort what runs and free the device's memory."""
        self.llm.close()

    def __getattr__(self, name: str) -> Any:
        if name == "llm":
            raise AttributeError(name)
        return getattr(self.llm, name)


AsyncLLMEngine = AsyncLLM
