"""`AsyncLLM`: an `LLM` for an event loop, with vLLM's names and order of arguments."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any, Literal

from ..lora.request import LoRARequest
from ..sampling.params import SamplingParams
from ..serve.llm.input_processor import PromptInput
from ..serve.llm.llm import LLM
from ..serve.llm.subscription import Subscription
from ..serve.llm.vllm import check_vllm_arguments
from ..serve.text.outputs import RequestOutput
from .llm_engine import EngineModelConfig
from .progress import Progress


def async_method(name: str) -> Callable[..., Awaitable[Any]]:
    """Return a coroutine method that runs a method of `LLM` in a worker thread."""

    async def method(self: "AsyncLLM", *args: Any, **keywords: Any) -> Any:
        return await asyncio.to_thread(getattr(self.llm, name), *args, **keywords)

    return method


class AsyncLLM:
    """`LLM` for event loops: one thread takes the engine's steps for all requests."""

    def __init__(self, llm: LLM):
        self.llm = llm

    @classmethod
    def from_engine_args(cls, engine_args: Any, *unused: Any, **ignored: Any) -> "AsyncLLM":
        """Start an engine with the keywords of an `EngineArgs`. Arguments about logs and workers are
        ignored."""
        return cls(LLM.from_engine_args(engine_args))

    async def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Any = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the outputs of a request, as its `output_kind` states, until it ends.

        A caller that is slower than the steps gets several steps as one output. Closing or cancelling the
        generator aborts the request.
        """
        check_vllm_arguments(tokenization_kwargs=tokenization_kwargs)
        progress, make = Progress(sampling_params.output_kind), self.llm.input_processor.make_subscription

        def subscribe() -> Subscription:
            subscription = make(prompt, sampling_params, priority, lora_request=lora_request)
            self.llm.session.assign_ids([subscription], request_id)
            return subscription

        def take_due_outputs(subscription: Subscription) -> list[RequestOutput]:
            return [] if (output := progress.take_due_output(subscription)) is None else [output]

        async with aclosing(self.llm.async_driver.stream(subscribe, take_due_outputs)) as outputs:
            async for output in outputs:
                yield output

    sleep, wake_up, is_sleeping = async_method("sleep"), async_method("wake_up"), async_method("is_sleeping")
    reset_prefix_cache = async_method("reset_prefix_cache")
    start_profile, stop_profile = async_method("start_profile"), async_method("stop_profile")

    async def pause_generation(self, *, mode: Literal["keep"] = "keep", **ignored: Any) -> None:
        """Take no more steps until `resume_generation`.

        Raises ValueError for a mode that ends the requests: call `abort` instead.
        """
        if mode != "keep":
            raise ValueError(f"mode={mode!r} is not supported: only 'keep'")
        await asyncio.to_thread(self.llm.async_driver.pause)

    async def resume_generation(self) -> None:
        self.llm.async_driver.resume()

    async def is_paused(self) -> bool:
        return self.llm.async_driver.is_paused

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """End requests now. Unknown ids are ignored."""
        for id in [request_id] if isinstance(request_id, str) else request_id:
            await asyncio.to_thread(self.llm.abort, id)

    @property
    def model_config(self) -> EngineModelConfig:
        return EngineModelConfig(self.llm)

    def shutdown(self, timeout: float | None = None) -> None:
        """Abort all requests and free the device's memory."""
        self.llm.close()

    def __getattr__(self, name: str) -> Any:
        if name == "llm":
            raise AttributeError(name)
        return getattr(self.llm, name)


AsyncLLMEngine = AsyncLLM
