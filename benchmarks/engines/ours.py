"""duetto behind the seam: one `LLM`, driven step by step."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.engines import Answer, Served, Setting
from benchmarks.traces import RESERVED, Request
from duetto import LLM, SamplingParams
from duetto.serve.cli.bench import count_prefills
from duetto.serve.host.devices import default_device
from duetto.serve.text.outputs import RequestOutput

COUNTED = ("prompt_tokens", "cached_tokens", "generated_tokens", "preemptions", "compilations")


class Ours:
    """duetto with the setting's seats and lengths; the cache holds a longest request for every seat."""

    def __init__(self, folder: Path, dtype: str, setting: Setting):
        sizes = {"max_num_seqs": setting.seats, "max_model_len": setting.longest}
        options = {"max_batched_token_mem": setting.seats * setting.longest, **sizes, **setting.options}
        if dtype == "auto" and default_device().platform == "cpu":
            dtype = "float32"  # whatever the processor multiplies: bfloat16 is another column
        options["background_compilation"] = False  # what is timed is to be the same each time
        self.llm = LLM(folder, dtype=dtype, **options)
        self.longest, self.draw = setting.longest, np.random.default_rng(2)
        self.decoding: tuple[int, int] | None = None

    def serve(self, requests: Sequence[Request]) -> Served:
        self._idle()
        assert self.llm.reset_prefix_cache(reset_connector=True)
        before = self.llm.report()
        due = deque(sorted(enumerate(requests), key=lambda item: item[1].arrival))
        found: dict[str, RequestOutput] = {}
        begin = time.monotonic()
        while due or self.llm.has_unfinished_requests():
            while due and begin + due[0][1].arrival <= time.monotonic():
                i, request = due.popleft()
                self.llm.add_request({"prompt_token_ids": request.prompt}, greedy(request.output), str(i))
            if self.llm.has_unfinished_requests():
                found |= {done.request_id: done for done in self.llm.step()}
            elif due:
                time.sleep(max(begin + due[0][1].arrival - time.monotonic(), 0))
        seconds = time.monotonic() - begin
        answers = [answer(found[str(i)], begin + r.arrival) for i, r in enumerate(requests)]
        return Served(seconds, answers, counted(before, self.llm.report()))

    def decode(self, rows: int, context: int, steps: int) -> float:
        if self.decoding != (rows, context):
            self._idle()
            for row in range(rows):
                self.llm.add_request(self._prompt(context), greedy(self.longest - context), f"decode {row}")
            seen = -1
            while seen < (seen := count_prefills(self.llm)):  # until a step has none left to dispatch
                self.llm.step()
            self.decoding = rows, context
        meter = self.llm.engine.stats
        before = meter.generated_tokens
        self.llm.step()  # one call is always on its way: this one was awaited long ago
        first, begin = meter.generated_tokens, time.perf_counter()
        for _ in range(max(1, steps * rows // (first - before))):
            self.llm.step()
        seconds = time.perf_counter() - begin
        jax.block_until_ready(self.llm.engine.cache)  # else the call on its way takes the next engine's time
        return seconds * rows / (meter.generated_tokens - first)

    def prefill(self, length: int) -> float:
        self._idle()
        prompt = self._prompt(length)
        begin = time.perf_counter()
        self.llm.generate({"prompt_token_ids": prompt}, greedy(1), use_tqdm=False)
        return time.perf_counter() - begin

    def score(self, texts: Sequence[tuple[list[int], int]], rows: int) -> float:
        self._idle()
        assert self.llm.reset_prefix_cache(reset_connector=True)
        begin = time.perf_counter()
        contexts, ends = [ids[:first] for ids, first in texts], [ids[first:] for ids, first in texts]
        self.llm.log_likelihood(contexts, ends)
        return time.perf_counter() - begin

    def _prompt(self, length: int) -> list[int]:
        return self.draw.integers(RESERVED, self.llm.config.vocab_size, length).tolist()

    def _idle(self) -> None:
        for row in range(self.decoding[0] if self.decoding else 0):
            self.llm.abort(f"decode {row}")
        while self.llm.has_unfinished_requests():
            self.llm.step()
        self.decoding = None


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def answer(found: RequestOutput, due: float) -> Answer:
    """Times are counted from the moment at which the request was due, not from the step that let it in."""
    assert found.metrics is not None
    late = found.metrics.arrival - due
    return Answer(late + found.metrics.ttft, late + found.metrics.e2e, list(found.outputs[0].token_ids))


def counted(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    steps = {name: n - before["steps"].get(name, 0) for name, n in after["steps"].items()}
    return {**{name: after[name] - before[name] for name in COUNTED}, "steps": steps}
