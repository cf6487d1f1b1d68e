"""llama.cpp behind the seam: its C API with parallel sequences, and a continuous batching of our own on top.

A step decodes one token of every running sequence and fills the rest of the batch with prompts, as
llama.cpp's server does.
"""

import ctypes
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.engines import Answer, Served, Setting
from benchmarks.models import gguf_for
from benchmarks.traces import RESERVED, Request

BATCH = 512  # tokens of a step at most


class Token(NamedTuple):
    """One entry of a batch: a token, where it stands in which sequence, and whether its logits are wanted."""

    id: int
    position: int
    sequence: int
    wanted: bool


@dataclass
class Running:
    """A request in a sequence: how many of its tokens are in the cache, and when its tokens came."""

    index: int
    request: Request
    sequence: int
    due: float
    computed: int = 0
    tokens: list[int] = field(default_factory=list)
    first: float = 0.0


class LlamaCpp:
    """A model and a context with as many sequences as there are seats, on all cores."""

    def __init__(self, folder: Path, dtype: str, setting: Setting):
        self.L: Any = import_module("llama_cpp")
        self.setting, self.draw = setting, np.random.default_rng(3)
        self.quiet = self.L.llama_log_callback(lambda *_: None)
        self.L.llama_log_set(self.quiet, ctypes.c_void_p(0))
        file = str(gguf_for(folder, dtype)).encode()
        self.model = self.L.llama_model_load_from_file(file, self.L.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {file.decode()}")
        self.vocabulary = self.L.llama_vocab_n_tokens(self.L.llama_model_get_vocab(self.model))
        self.context: Any = None
        self.decoding: tuple[int, int] | None = None
        self.batch = self.L.llama_batch_init(BATCH, 0, 1)

    def serve(self, requests: Sequence[Request]) -> Served:
        self._open(self.setting.seats, self.setting.options.get("unified", True))
        begin = time.perf_counter()
        waiting = deque(sorted(enumerate(requests), key=lambda item: item[1].arrival))
        free, running, answers = list(range(self.setting.seats))[::-1], [], {}
        while waiting or running:
            now = time.perf_counter()
            while waiting and free and begin + waiting[0][1].arrival <= now:
                i, request = waiting.popleft()
                running.append(Running(i, request, free.pop(), begin + request.arrival))
            if not running:
                time.sleep(max(begin + waiting[0][1].arrival - now, 0))
                continue
            self._step(running)
            for done in [r for r in running if len(r.tokens) >= r.request.output]:
                running.remove(done)
                free.append(done.sequence)
                self._forget(done.sequence)
                answers[done.index] = Answer(
                    done.first - done.due, time.perf_counter() - done.due, done.tokens
                )
        return Served(time.perf_counter() - begin, [answers[i] for i in range(len(requests))])

    def _step(self, running: list[Running]) -> None:
        """Tokens of the sequences that generate, then as much of the prompts as the batch holds."""
        batch: list[Token] = []
        ends: list[Running] = []
        for r in sorted(running, key=lambda r: not r.tokens):
            left = r.tokens[-1:] or r.request.prompt[r.computed :]
            piece = left[: BATCH - len(batch)]
            ended = len(piece) == len(left) and bool(piece)
            at = r.computed
            batch += [
                Token(t, at + i, r.sequence, ended and i == len(piece) - 1) for i, t in enumerate(piece)
            ]
            r.computed += len(piece)
            ends += [r] * ended
        tokens = self._decode(batch)
        now = time.perf_counter()
        for r, token in zip(ends, tokens, strict=True):
            r.first = r.first or now
            r.tokens.append(token)

    def decode(self, rows: int, context: int, steps: int) -> float:
        if self.decoding != (rows, context):
            self._open(rows, unified=False)
            for row in range(rows):
                self._read_prompt(context, row)
            self.decoding, self.at = (rows, context), context
        begin = time.perf_counter()
        for _ in range(steps):
            self._decode([Token(self.at % self.vocabulary, self.at, row, True) for row in range(rows)])
            self.at += 1
        return (time.perf_counter() - begin) / steps

    def prefill(self, length: int) -> float:
        if self.decoding != (0, 0):
            self._open(1, unified=False)
            self.decoding = 0, 0
        self._forget(0)
        begin = time.perf_counter()
        self._read_prompt(length, 0)
        return time.perf_counter() - begin

    def _read_prompt(self, length: int, sequence: int) -> None:
        prompt = self.draw.integers(RESERVED, self.vocabulary, length).tolist()
        for k in range(0, length, BATCH):
            chunk = prompt[k : k + BATCH]
            self._decode([Token(t, k + i, sequence, k + i == length - 1) for i, t in enumerate(chunk)])

    def _open(self, sequences: int, unified: bool) -> None:
        """An empty context. A unified cache is one buffer for all sequences; otherwise each has its own."""
        if self.context is not None:
            self.L.llama_free(self.context)
        self.decoding = None
        params = self.L.llama_context_default_params()
        params.n_ctx, params.n_seq_max = sequences * self.setting.longest, sequences
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = os.cpu_count() or 1
        params.kv_unified = unified
        self.context = self.L.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp makes no context for {sequences} sequences")

    def _forget(self, sequence: int) -> None:
        self.L.llama_memory_seq_rm(self.L.llama_get_memory(self.context), sequence, -1, -1)

    def _decode(self, tokens: list[Token]) -> list[int]:
        """One step; returns the likeliest next token of each entry whose logits are wanted."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token.id, token.position, 1
            batch.seq_id[i][0], batch.logits[i] = token.sequence, token.wanted
        code = self.L.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode returns {code} for {len(tokens)} tokens")
        wanted = sum(token.wanted for token in tokens)
        if not wanted:
            self.L.llama_synchronize(self.context)
            return []
        logits = self.L.llama_get_logits(self.context)
        return np.ctypeslib.as_array(logits, (wanted, self.vocabulary)).argmax(-1).tolist()
