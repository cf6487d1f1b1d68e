"""An engine in a worker process, its requests and its description."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ....lora.request import LoRARequest
from ....sampling.custom import LogitsProcessor
from ....sampling.params import SamplingParams
from ...llm.llm import LLM
from ...llm.weights import realms_of
from ...text.outputs import RequestOutput

# Seconds of steps after which a worker returns: with finished requests, and in any case.
ENOUGH, MOST = 0.05, 1.0


class WorkerRequest(NamedTuple):
    id: str
    prompt: list[int]
    params: SamplingParams
    lora_request: LoRARequest | None = None


@dataclass(frozen=True)
class WorkerInfo:
    """Description of a worker's engine, which is read before it gets requests."""

    vocab_size: int
    max_model_len: int
    eos_ids: tuple[int, ...]
    products: str | None
    process: int = 0  # process id on its machine
    realm: str = ""  # of its answers
    processors: tuple[LogitsProcessor, ...] = ()  # of its step


class WorkerLost(Exception):
    """A worker's process is lost."""


class Worker:
    """An engine in a worker process."""

    def __init__(self, **arguments: Any):
        self._llm = LLM(**arguments)

    def facts(self) -> WorkerInfo:
        llm, sizes = self._llm, self._llm.engine.sizes
        return WorkerInfo(
            llm.config.vocab_size,
            sizes.max_model_len,
            llm.input_processor.eos_ids,
            self.report()["products"],
            os.getpid(),
            realms_of(llm.session, llm.input_processor).name,
            sizes.processors,
        )

    def take(self, new: Sequence[WorkerRequest]) -> list[RequestOutput]:
        """Add requests and run steps; return the outputs that have finished."""
        for id, prompt, params, adapter in new:
            self._llm.add_request(prompt, params, id, lora_request=adapter)
        begin, ended = time.monotonic(), []
        while self._llm.has_unfinished_requests():
            ended += self._llm.step()
            if time.monotonic() - begin > (ENOUGH if ended else MOST):
                break
        return ended

    def report(self, explained: bool = False) -> dict[str, Any]:
        """Return the engine's report. On a CPU, whose compiler chooses no products, `products` is the
        dtype, and the kernels if they are duetto's own."""
        found = self._llm.report(explained)
        own = ", ".join(filter(None, (found["dtype"], found.get("cpu_kernels_target"))))
        return found | {"products": found.get("products") or own}
