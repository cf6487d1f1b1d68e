"""Transformers behind the seam: static batches by `generate`, and its continuous batching by the manager
behind `generate_batch`."""

import os
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.engines import Answer, Served, Setting
from benchmarks.traces import RESERVED, Request

ROWS = 16  # of a static batch
PAGE = 16


class Model:
    """A causal language model on all cores, and what both ways to serve it share: single steps."""

    def __init__(self, folder: Path, dtype: str, setting: Setting):
        self.torch: Any = import_module("torch")
        transformers: Any = import_module("transformers")
        self.torch.set_num_threads(os.cpu_count() or 1)
        transformers.utils.logging.set_verbosity_error()
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.device = "cuda" if self.torch.cuda.is_available() else "cpu"
        self.model = load(folder, dtype=getattr(self.torch, dtype)).to(self.device).eval()
        self.setting, self.transformers = setting, transformers
        self.state: tuple[tuple[int, int], Any] | None = None

    def decode(self, rows: int, context: int, steps: int) -> float:
        with self.torch.inference_mode():
            if self.state is None or self.state[0] != (rows, context):
                self.state = None
                out = self.model(self._prompts(rows, context), use_cache=True, logits_to_keep=1)
                self.state = (rows, context), out
            out, begin = self.state[1], time.perf_counter()
            for _ in range(steps):
                token = out.logits[:, -1].argmax(-1, keepdim=True)
                out = self.model(token, past_key_values=out.past_key_values, use_cache=True)
            out.logits[0, -1, 0].item()  # until an accelerator is done
            seconds = (time.perf_counter() - begin) / steps
            self.state = (rows, context), out
        return seconds

    def prefill(self, length: int) -> float:
        prompt = self._prompts(1, length)
        begin = time.perf_counter()
        with self.torch.inference_mode():
            self.model(prompt, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1).item()
        return time.perf_counter() - begin

    def score(self, texts: Sequence[tuple[list[int], int]], rows: int) -> float:
        """A forward pass for each batch of texts, padded on the left, with the logits that are wanted."""
        self.state, begin = None, time.perf_counter()
        with self.torch.inference_mode():
            for i in range(0, len(texts), rows):
                self._likelihoods(texts[i : i + rows])
        return time.perf_counter() - begin

    def _likelihoods(self, texts: Sequence[tuple[list[int], int]]) -> list[list[float]]:
        ids, mask = self._padded([text for text, _ in texts])
        counts = [len(text) - first for text, first in texts]
        keep = {"logits_to_keep": max(counts) + 1, "use_cache": False}
        logits = self.model(ids, attention_mask=mask, **keep).logits
        found = []
        for row, own, count in zip(logits, ids, counts, strict=True):
            scores = self.torch.log_softmax(row[-count - 1 : -1].float(), -1)
            found.append(scores.gather(1, own[-count:, None])[:, 0].tolist())
        return found

    def _padded(self, texts: Sequence[list[int]]) -> tuple[Any, Any]:
        longest = max(map(len, texts))
        ids = [[0] * (longest - len(text)) + text for text in texts]
        mask = [[0] * (longest - len(text)) + [1] * len(text) for text in texts]
        return self.torch.tensor(ids, device=self.device), self.torch.tensor(mask, device=self.device)

    def _prompts(self, rows: int, length: int) -> Any:
        return self.torch.randint(RESERVED, self.model.config.vocab_size, (rows, length), device=self.device)


class Static(Model):
    """Batches of ROWS requests in the order given, padded on the left, each run to its longest answer."""

    def serve(self, requests: Sequence[Request]) -> Served:
        self.state = None
        begin, answers = time.perf_counter(), []
        for i in range(0, len(requests), ROWS):
            group = requests[i : i + ROWS]
            tokens = self._batch(group)
            spent = time.perf_counter() - begin
            answers += [Answer(None, spent, row[: r.output]) for row, r in zip(tokens, group, strict=True)]
        return Served(time.perf_counter() - begin, answers)

    def _batch(self, requests: Sequence[Request]) -> list[list[int]]:
        longest, most = max(len(r.prompt) for r in requests), max(r.output for r in requests)
        ids, mask = self._padded([r.prompt for r in requests])
        with self.torch.inference_mode():
            lengths = {"max_new_tokens": most, "min_new_tokens": most}
            out = self.model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **lengths)
        return out[:, longest:].tolist()


class Continuous(Model):
    """The manager's thread takes requests of different lengths; the queue holds all of them from the
    start."""

    def __init__(self, folder: Path, dtype: str, setting: Setting):
        super().__init__(folder, dtype, setting)
        self.model.set_attn_implementation("sdpa")

    def serve(self, requests: Sequence[Request]) -> Served:
        self.state = None
        longest = max(r.output for r in requests)
        generation = {"max_new_tokens": longest, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
        pages = self.setting.seats * self.setting.longest // PAGE
        sizes = {"page_size": PAGE, "num_blocks": pages, "max_batch_tokens": 512, "use_cuda_graph": False}
        with self.model.continuous_batching_context_manager(
            generation_config=self.transformers.GenerationConfig(**generation),
            continuous_batching_config=self.transformers.ContinuousBatchingConfig(**sizes),
        ) as manager:
            begin = time.perf_counter()
            for i, r in enumerate(requests):
                manager.add_request(
                    r.prompt, request_id=str(i), max_new_tokens=r.output, record_timestamps=True
                )
            found = {}
            while len(found) < len(requests):
                result = manager.get_result(timeout=60)
                if result is None or result.error is not None:
                    raise RuntimeError(f"continuous batching gave up: {result and result.error}")
                found[result.request_id] = result
            seconds = time.perf_counter() - begin
        return Served(seconds, [self._answer(found[str(i)], begin) for i in range(len(requests))])

    def _answer(self, result: Any, begin: float) -> Answer:
        first = result.timestamps[0] if result.timestamps else None
        spent = (result.timestamps[-1] if result.timestamps else result.lifespan[1]) - begin
        return Answer(None if first is None else first - begin, spent, list(result.generated_tokens))
