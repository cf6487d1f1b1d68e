"""The seam between measurements and engines: every engine loads the same folder and answers the same
requests.

An engine lives in a process of its own (`benchmarks.worker`), because thread pools of different libraries
disturb each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from benchmarks.traces import Request


@dataclass(frozen=True)
class Answer:
    """Seconds from a request's arrival to its first and to its last token, and the tokens; a static batch
    returns all at once."""

    ttft: float | None
    e2e: float
    tokens: list[int]


@dataclass(frozen=True)
class Served:
    """A whole run: seconds from its start to its last token, the answers in the requests' order, and the
    engine's own counts."""

    seconds: float
    answers: list[Answer]
    counts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """What an engine is made for: seats, tokens of the longest request, and options of its own."""

    seats: int
    longest: int
    options: dict[str, Any] = field(default_factory=dict)


class Engine(Protocol):
    """All methods take token ids or numbers, so that they can be called from another process."""

    def __init__(self, folder: Path, dtype: str, setting: Setting): ...

    def serve(self, requests: Sequence[Request]) -> Served:
        """Greedy continuations of exactly the lengths asked for; nothing is remembered of earlier runs."""
        ...

    def decode(self, rows: int, context: int, steps: int) -> float:
        """Mean seconds of a step of `rows` sequences that had `context` tokens before the first call with
        these numbers."""
        ...

    def prefill(self, length: int) -> float:
        """Seconds from a prompt that was never seen to its first token, nothing else being served."""
        ...

    def score(self, texts: Sequence[tuple[list[int], int]], rows: int) -> float:
        """Seconds of the log-probabilities of texts, each from a position on, in batches of `rows` where an
        engine is told how to batch; nothing is remembered of earlier calls. Not of llama.cpp."""
        ...


@dataclass(frozen=True)
class Variant:
    """An engine as it is measured: where it is, its dtype and options, and the package that it needs beside
    duetto's."""

    module: str
    engine: str
    dtype: str
    needs: str = "duetto"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def installed(self) -> bool:
        return self.version is not None

    @property
    def version(self) -> str | None:
        try:
            return version(self.needs)
        except PackageNotFoundError:
            return None

    def make(self, folder: Path, setting: Setting) -> Engine:
        own = Setting(setting.seats, setting.longest, {**self.options, **setting.options})
        return getattr(import_module(f"benchmarks.engines.{self.module}"), self.engine)(
            folder, self.dtype, own
        )


def both(name: str, module: str, engine: str, needs: str) -> dict[str, Variant]:
    """A variant in float32 and one in bfloat16."""
    return {f"{name} {dtype}": Variant(module, engine, dtype, needs) for dtype in ("float32", "bfloat16")}


OURS, OURS_NARROW, OURS_FREE = "duetto", "duetto bfloat16", "duetto, no contract"
OURS_XLA, OURS_CODES = "duetto without kernels", "duetto quantised"
OURS_STEPS, OURS_CODES_STEPS = "duetto, 4 steps a call", "duetto quantised, 4 steps a call"
STATIC, CONTINUOUS, LLAMA = "Transformers static", "Transformers continuous", "llama.cpp"
VARIANTS: dict[str, Variant] = {
    OURS: Variant("ours", "Ours", "auto"),
    OURS_NARROW: Variant("ours", "Ours", "bfloat16"),
    OURS_FREE: Variant("ours", "Ours", "auto", options={"reproducible": False}),
    f"{OURS_FREE} bfloat16": Variant("ours", "Ours", "bfloat16", options={"reproducible": False}),
    f"{OURS_XLA} bfloat16": Variant("ours", "Ours", "bfloat16", options={"cpu_kernels": False}),
    f"{OURS_CODES} int8": Variant("ours", "Ours", "bfloat16", options={"quantization": "int8"}),
    f"{OURS_STEPS} bfloat16": Variant("ours", "Ours", "bfloat16", options={"decode_steps": 4}),
    f"{OURS_CODES_STEPS} int8": Variant(
        "ours", "Ours", "bfloat16", options={"quantization": "int8", "decode_steps": 4}
    ),
    **both(LLAMA, "llamacpp", "LlamaCpp", "llama-cpp-python"),
    **both(STATIC, "hugging_face", "Static", "transformers"),
    **both(CONTINUOUS, "hugging_face", "Continuous", "transformers"),
}
