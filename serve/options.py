"""How an engine is sized: every knob with its meaning, its default, and an error that says what to change."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from .speculative import SpeculativeConfig

MAX_DECODE_STEPS = 1024  # a dispatch holds every one of its steps' results
EDGE, SMALLEST_CHUNK = 16, 64  # tokens: what a prefill bucket is a multiple of, and one that every table has
QUANTIZATIONS = ("int8", "int4", "fp8", "dequantize")


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def knob(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class EngineOptions:
    """Sizes and limits of one engine; None is derived from the model and the device."""

    max_model_len: int | None = knob(
        None, "tokens of one request, prompt and output together; default: the model's own limit"
    )
    max_num_seqs: int = knob(32, "requests that run at the same time")
    max_prefill_tokens: int = knob(
        512, "prompt tokens computed between two decode steps; a longer prompt is read in chunks"
    )
    prefill_buckets: tuple[int, ...] | None = knob(
        None,
        "lengths that a prompt's chunk is padded to where it is alone, such as 64,192,512; default: powers of two from 64 on",
    )
    max_batched_token_mem: int | None = knob(
        None, "tokens that the KV cache holds; default: what the memory allows"
    )
    max_input_length: int | None = knob(None, "longest prompt in tokens; default: max_model_len - 1")
    max_output_length: int | None = knob(
        None, "most tokens generated for one request; default: what max_model_len leaves"
    )
    gpu_memory_utilization: float = knob(
        0.9, "share of an accelerator's memory for weights, cache and temporaries"
    )
    page_size: int = knob(64, "tokens of a page of the KV cache: a divisor or a multiple of 128")
    decode_steps: int = knob(1, "decode steps taken in one dispatch while no prompt waits")
    reproducible: bool = knob(True, "a request's bits depend on the request alone; False may narrow decode")
    enable_prefix_caching: bool = knob(True, "find the pages of prompts that begin alike")
    speculative_config: Mapping[str, Any] | None = knob(
        None, 'how tokens are guessed ahead, such as {"method": "ngram", "num_speculative_tokens": 7}'
    )
    quantization: str | None = knob(
        None, "int8, int4 or fp8 weights, or dequantize; default: as the checkpoint stores them"
    )
    seed: int = knob(0, "seed of requests that bring none")

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type in (int, int | None) and value is not None and f.name != "seed" and value < 1:
                raise ValueError(f"{f.name} {value} is not allowed: 1 or more")
        if self.quantization not in (None, *QUANTIZATIONS):
            raise ValueError(
                f"quantization={self.quantization!r} is not allowed: {', '.join(QUANTIZATIONS)}, or None, which keeps "
                "weights as the checkpoint stores them"
            )
        self._check_buckets()
        if self.decode_steps > MAX_DECODE_STEPS:
            raise ValueError(f"decode_steps {self.decode_steps} is not allowed: 1 to {MAX_DECODE_STEPS}")
        if self.guesses and self.decode_steps > 1:
            raise ValueError(
                f"decode_steps {self.decode_steps} is not allowed with speculative_config: only 1"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization {self.gpu_memory_utilization} is not allowed: above 0, at most 1"
            )

    def _check_buckets(self) -> None:
        edges, last = self.prefill_buckets, round_up(self.max_prefill_tokens, SMALLEST_CHUNK)
        if edges is None:
            return
        rising = all(a < b for a, b in zip([0, *edges], edges, strict=False))
        if not edges or not rising or any(edge % EDGE for edge in edges) or edges[-1] != last:
            raise ValueError(
                f"prefill_buckets {tuple(edges)} is not allowed: rising multiples of {EDGE}, of which the last is {last}, "
                f"max_prefill_tokens rounded up to a multiple of {SMALLEST_CHUNK}"
            )

    @cached_property
    def speculation(self) -> SpeculativeConfig:
        return SpeculativeConfig.from_dict(self.speculative_config)

    @property
    def guesses(self) -> int:
        """The most guesses of a row in a step; 0 without speculation."""
        return self.speculation.guesses

    @property
    def nodes(self) -> int:
        """Tokens of a row that a verification computes, where guesses branch; 0 where they do not."""
        return 0 if self.speculation.tree is None else self.speculation.tree.nodes

    @property
    def most_tokens(self) -> int:
        """Tokens of one sequence that a step computes at most; a scored chunk repeats one."""
        return max(self.max_prefill_tokens, self.decode_steps, self.guesses) + 1
