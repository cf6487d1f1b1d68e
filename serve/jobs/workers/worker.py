"""An engine in a worker process, its requests, and the facts that its caller reads first."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ....lora.request import LoRARequest
from ....sampling.custom_processors import LogitsProcessor
from ....sampling.params import SamplingParams
from ...llm.input_processor import PromptInput
from ...llm.llm import LLM
from ...llm.weights import set_answer_realm
from ...text.outputs import RequestOutput

# Seconds of steps after which `Worker.run_requests` returns: if a request has finished, and in any case.
MIN_STEP_SECONDS, MAX_STEP_SECONDS = 0.05, 1.0


class WorkerRequest(NamedTuple):
    """Arguments of `LLM.add_request`, as they are sent to a worker."""

    id: str
    prompt: PromptInput
    params: SamplingParams
    lora_request: LoRARequest | None = None


@dataclass(frozen=True)
class WorkerInfo:
    """Description of a worker's engine, read before the worker gets requests."""

    vocab_size: int
    max_model_len: int
    eos_ids: tuple[int, ...]
    products: str | None
    process_id: int = 0  # process id on its machine
    realm: str = ""  # realm of its answers
    processors: tuple[LogitsProcessor, ...] = ()  # logits processors of its step
    has_head: bool = True  # the model can generate


class WorkerLost(Exception):
    """A worker's process is lost."""


class Worker:
    """An LLM in a worker process."""

    def __init__(self, **arguments: Any):
        self._llm = LLM(**arguments)

    def describe(self) -> WorkerInfo:
        llm, sizes = self._llm, self._llm.engine.sizes
        return WorkerInfo(
            llm.config.vocab_size,
            sizes.max_model_len,
            llm.input_processor.eos_ids,
            self.report()["products"],
            os.getpid(),
            set_answer_realm(llm.session, llm.input_processor).name,
            sizes.processors,
            llm.config.has_head,
        )

    def run_requests(self, requests: Sequence[WorkerRequest]) -> list[RequestOutput]:
        """Add requests, run steps for at most `MAX_STEP_SECONDS` seconds, and return the finished outputs.
        Returns after `MIN_STEP_SECONDS` seconds if a request has finished."""
        for id, prompt, params, adapter in requests:
            self._llm.add_request(prompt, params, id, lora_request=adapter)
        start_time, outputs = time.monotonic(), []
        while self._llm.has_unfinished_requests():
            outputs += self._llm.step()
            if time.monotonic() - start_time > (MIN_STEP_SECONDS if outputs else MAX_STEP_SECONDS):
                break
        return outputs

    def report(self, explained: bool = False) -> dict[str, Any]:
        """Return the engine's report, always with `products`. On a CPU, whose compiler chooses none, these
        are the dtype and the name of duetto's CPU kernels."""
        report = self._llm.report(explained)
        products = ", ".join(filter(None, (report["dtype"], report.get("cpu_kernels_target"))))
        return report | {"products": report.get("products") or products}
