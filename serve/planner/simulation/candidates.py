"""Candidates of a plan: layouts over a target's devices, an engine's knobs, and the command line that starts
each."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import jax.numpy as jnp

from ....kvcache.pages import page_bytes
from ....kvcache.quantised import kept_as
from ....model.config import Experts, ModelConfig
from ....model.transformer import Decoder
from ...options.engine import EngineOptions
from ...runtime.compiled.shapes import Shape, doublings, shapes_of
from .fitting import Fitted, PlannedModel, fit
from .times import Demands, Efficiency, Roofline

GUESSES = (2, 4)  # a step, where an acceptance is given
SEATS = (16, 32, 64, 128, 256, 512)
NARROW = {"gpu": ("fp8", "fp8_e4m3"), "tpu": ("int8", "int8")}  # of weights and of keys
HANDED = 50e9  # bytes/s from a device to another engine's: PCIe 5.0 x16, through the host's memory
MOST_APART = 8  # engines of one that computes prompts, itself among them
ADDRESS = "localhost:5700"  # of an engine that computes prompts
PREFILLS = (512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Candidate:
    """An engine on some of the target's devices.

    times: seconds of its calls.
    replicas: number of engines that fill the target.
    acceptance: probability that a draft token is accepted.
    apart: decode engines for each prefill engine; 0 if one engine does both.
    """

    fitted: Fitted
    times: Roofline
    shapes: Sequence[Shape]
    replicas: int
    platform: str
    acceptance: float = 0.0
    apart: int = 0  # engines that decode beside one that computes their prompts; 0: one engine does both

    @property
    def options(self) -> EngineOptions:
        return self.fitted.options

    @property
    def devices(self) -> int:
        """Number of devices of one replica."""
        return self.fitted.layout.size * (1 + self.apart)

    @property
    def decoders(self) -> int:
        """Engines of one replica that decode."""
        return self.apart or 1

    @property
    def token_seconds(self) -> float:
        """Seconds that a token's keys take to another engine, each device's part through its host."""
        own = self.fitted
        return own.cache / (max(own.sizes.pages) * own.sizes.page_size) / HANDED

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """Bytes of a page of each window, on all devices of an engine."""
        demands, o = self.times.demands, self.options
        kept = kept_as(o.kv_cache_dtype, jnp.dtype(demands.dtype))
        layers = demands.config.within(self.fitted.sizes.max_model_len).layers
        return page_bytes(layers, o.page_size, kept)

    def splits(self) -> Iterator["Candidate"]:
        """The same with prompts computed apart, for one engine that decodes, or more; not with pages in the
        host's memory, which are not simulated there."""
        lay, o = self.fitted.layout, self.options
        if self.apart or lay.data > 1 or lay.stages > 1 or o.swap_space or not o.enable_prefix_caching:
            return
        for decoders in range(1, min(self.replicas, MOST_APART)):
            yield replace(self, apart=decoders, replicas=self.replicas // (1 + decoders))

    @property
    def name(self) -> str:
        """Its layout and what differs from the defaults, in a few words."""
        o = self.options
        parts = [f"TP{o.tensor_parallel_size}"]
        parts += [f"PP{o.pipeline_parallel_size}"] if o.pipeline_parallel_size > 1 else []
        parts += [f"DP{o.data_parallel_size}"] if o.data_parallel_size > 1 else []
        parts += ["EP"] if o.enable_expert_parallel else []
        parts += [o.quantization] if o.quantization else []
        parts += [f"keys {o.kv_cache_dtype}"] if o.kv_cache_dtype != "auto" else []
        parts += [f"{o.max_num_seqs} seats", f"prefill {o.max_prefill_tokens}"]
        parts += [f"{o.micro_batches} micro-batches"] if o.micro_batches else []
        parts += [f"{o.most_steps} steps"] if o.most_steps > 1 else []
        parts += [f"{o.guesses} guesses"] if o.guesses else []
        parts += [f"prefill apart, 1 for {self.apart}"] if self.apart else []
        return ", ".join(parts)

    def commands(self, model: str | None, flags: Sequence[str] = ()) -> list[str]:
        """Return the command that starts each engine of one replica, with `flags` added to those of the
        engine."""
        start = ["duetto", "serve", *(["--model", model] if model else []), *flags]
        if not self.apart:
            return [self._command(start, self.options)]
        roles = "prefill", *["decode"] * self.apart
        return [self._command(start, replace(self.options, kv_role=r, kv_address=ADDRESS)) for r in roles]

    def _command(self, start: Sequence[str], options: EngineOptions) -> str:
        default, words = EngineOptions(), [*start]
        for f in fields(EngineOptions):
            value = getattr(options, f.name)
            if value != getattr(default, f.name) and f.metadata.get("flag", True):
                words += flag(f.name, value)
        return shlex.join(words)


def flag(name: str, value: Any) -> list[str]:
    word = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [word if value else f"--no-{word[2:]}"]
    if isinstance(value, tuple):
        return [word, ",".join(map(str, value))]
    return [word, json.dumps(value) if isinstance(value, dict) else str(value)]


@dataclass
class Space:
    """Candidates for a job. What was counted and drawn up once is kept: `demands` and `params` by
    quantisation and keys. Options that are `fixed` stay as the base has them."""

    job: PlannedModel
    base: EngineOptions
    efficiency: Efficiency
    acceptance: float | None = None
    quantised: bool = False  # consider 8 bits for weights and keys too
    fixed: frozenset[str] = frozenset()

    def __post_init__(self):
        if self.job.target.platform != "cpu":
            self.base = replace(self.base, cpu_kernels=None)
        self._params: dict[str | None, Decoder] = {}
        self._demands: dict[tuple[str | None, str], Demands] = {}
        self.refused: dict[str, str] = {}  # layouts, and why not

    def candidate(self, **changes: Any) -> Candidate | None:
        """The base with changes, or None where it does not fit or is not allowed."""
        try:
            return self.made(**changes)
        except ValueError:
            return None

    def made(self, **changes: Any) -> Candidate:
        """The base with changes. Raises ValueError where it does not fit or is not allowed."""
        options = replace(self.base, **changes)
        fitted = fit(self.job, options, self.params(options.quantization))
        o, sizes = fitted.options, fitted.sizes
        times = Roofline(self.demands(o), self.job.target.peaks, fitted.layout, self.efficiency)
        platform, dtype = self.job.target.platform, jnp.dtype(self.job.dtype)
        shapes = shapes_of(o, sizes, self.job.config.layers, platform, dtype)
        replicas, right = self.job.target.count // fitted.layout.size, self.acceptance or 0.0
        return Candidate(fitted, times, shapes, replicas, platform, right)

    def params(self, quantization: str | None) -> Decoder:
        if quantization not in self._params:
            self._params[quantization] = self.job.params(quantization)
        return self._params[quantization]

    def demands(self, o: EngineOptions) -> Demands:
        key = o.quantization, o.kv_cache_dtype
        if key not in self._demands:
            params = self.params(o.quantization)
            self._demands[key] = Demands(self.job.config, params, self.job.dtype, o.kv_cache_dtype)
        return self._demands[key]

    def layouts(self) -> Iterator[Candidate]:
        """A candidate of each layout that fits, with the base's knobs, in each precision."""
        for layout, precision in product(self._ways(), self._precisions()):
            try:
                found = self.made(**(layout | precision))
            except ValueError as error:
                self.refused.setdefault(layout_name(self.base, layout | precision), str(error))
            else:
                yield found

    def _ways(self) -> list[dict[str, Any]]:
        """Layouts with what is fixed of them; the base's own if that is in none."""
        own, fixed = vars(self.base), [name for name in LAYOUT if name in self.fixed]
        every = layouts(self.job.config, self.job.target.count)
        return [way for way in every if all(way.get(n, own[n]) == own[n] for n in fixed)] or [{}]

    def _precisions(self) -> list[dict[str, Any]]:
        """The base's, and those of 8 bits that the target computes with."""
        if not self.quantised:
            return [{}]
        own = NARROW[self.job.target.platform]
        weights: dict[str, Any] = {"quantization": own[0]}
        every = {}, weights, weights | {"kv_cache_dtype": own[1]}
        return [change for change in every if self.fixed.isdisjoint(change)]

    def variations(self, own: Candidate) -> Iterator[tuple[str, dict[str, Any]]]:
        """Changes of one knob at a time, of those that are not fixed: its name and the options with the
        change."""
        return (found for found in self._knobs(own) if self.fixed.isdisjoint(found[1]))

    def _knobs(self, own: Candidate) -> Iterator[tuple[str, dict[str, Any]]]:
        o = own.options
        for seats in SEATS:
            yield "seats", {"max_num_seqs": seats}
        for tokens in PREFILLS:
            yield "prefill tokens", {"max_prefill_tokens": tokens}
        for size in (16, 64, 128):
            yield "page size", {"page_size": size}
        if o.pipeline_parallel_size > 1:
            for count in doublings(1, 2 * o.pipeline_parallel_size):
                yield "micro-batches", {"micro_batches": count}
        elif self.acceptance is None or not o.guesses:
            yield "decode steps", {"decode_steps": 4}
        if self.acceptance is not None and o.most_steps == 1:
            for guesses in GUESSES:
                config = {"method": "ngram", "num_speculative_tokens": guesses}
                yield "speculation", {"speculative_config": config}


LAYOUT = "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel"


def layout_name(base: EngineOptions, changes: Mapping[str, Any]) -> str:
    """Name a layout, also of options that are not allowed."""
    tensor, stages, data, experts = (changes.get(name, getattr(base, name)) for name in LAYOUT)
    narrow = [changes[name] for name in ("quantization", "kv_cache_dtype") if name in changes]
    return " ".join([f"TP{tensor} PP{stages} DP{data}", *(["EP"] if experts else []), *narrow])


def layouts(config: ModelConfig, devices: int) -> Iterator[dict[str, Any]]:
    """Every way to spread a model over a number of devices or fewer: each layer, consecutive layers, and
    experts with rows of their own."""
    powers = [n for n in doublings(1, devices) if devices % n == 0]
    mixture = any(isinstance(kind.ffn, Experts) for kind in config.layers)
    for tensor in powers:
        for stages in (n for n in powers if tensor * n <= devices):
            yield {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
        if mixture and tensor > 1:
            yield {"tensor_parallel_size": tensor, "enable_expert_parallel": True}
        for data in (n for n in powers if mixture and n > 1 and tensor * n <= devices):
            yield {
                "tensor_parallel_size": tensor, "data_parallel_size": data, "enable_expert_parallel": True,
            }  # fmt: skip
