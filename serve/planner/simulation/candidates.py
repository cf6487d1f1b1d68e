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
from ....kvcache.quantised import choose_cache_format
from ....model.config import Experts, ModelConfig
from ....model.transformer import Decoder
from ....model.weights.compression.compress import quantise_inputs
from ...options.engine import EngineOptions
from ...runtime.compiled.shapes import Shape, doublings, engine_shapes
from .memory_fit import FittedEngine, PlannedModel, fit_engine
from .step_times import Demands, Efficiency, RooflineTimes

DRAFT_COUNTS = (2, 4)  # draft tokens a step, if an acceptance is stated
SLOT_COUNTS = (16, 32, 64, 128, 256, 512)
NARROW_FORMATS = {"gpu": ("fp8", "fp8_e4m3"), "tpu": ("int8", "int8")}  # formats of weights and of keys
# Bytes/s from a device to another engine's: PCIe 5.0 x16, through the host's memory.
KV_TRANSFER_BANDWIDTH = 50e9
MAX_DISAGGREGATED_ENGINES = 8  # engines of a replica with a prefill engine, at most
PREFILL_ADDRESS = "localhost:5700"  # address of a prefill engine
PREFILL_TOKENS = (512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Candidate:
    """An engine on some of the target's devices.

    fitted: options, layout and sizes.
    roofline: seconds of its calls.
    shapes: of its programs.
    replicas: number of engines that fill the target.
    acceptance: probability that a draft token is accepted.
    decoders_per_prefill: number of decode engines for each prefill engine; 0 if one engine does both.
    """

    fitted: FittedEngine
    roofline: RooflineTimes
    shapes: Sequence[Shape]
    replicas: int
    platform: str
    acceptance: float = 0.0
    decoders_per_prefill: int = 0

    @property
    def options(self) -> EngineOptions:
        return self.fitted.options

    @property
    def num_devices(self) -> int:
        """Return the number of devices of one replica."""
        return self.fitted.layout.num_devices * (1 + self.decoders_per_prefill)

    @property
    def num_decoders(self) -> int:
        """Return the number of engines of one replica that decode."""
        return self.decoders_per_prefill or 1

    @property
    def token_transfer_seconds(self) -> float:
        """Return the seconds to send a token's keys to another engine. Each device sends its part through its
        host."""
        fitted = self.fitted
        return fitted.cache_bytes / (max(fitted.sizes.pages) * fitted.sizes.page_size) / KV_TRANSFER_BANDWIDTH

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """Return the bytes of a page of each window, on all devices of an engine."""
        demands, options = self.roofline.demands, self.options
        cache_format = choose_cache_format(options.kv_cache_dtype, jnp.dtype(demands.dtype))
        layers = demands.config.drop_unreached_limits(self.fitted.sizes.max_model_len).layers
        return page_bytes(layers, options.page_size, cache_format)

    def disaggregated_candidates(self) -> Iterator["Candidate"]:
        """Yield the candidate with a prefill engine for one decode engine, and for more. Pages in the host's
        memory are not simulated there, so a candidate with them yields none."""
        layout, options = self.fitted.layout, self.options
        if (
            self.decoders_per_prefill
            or layout.data > 1
            or layout.stages > 1
            or options.swap_space
            or not options.enable_prefix_caching
        ):
            return
        for count in range(1, min(self.replicas, MAX_DISAGGREGATED_ENGINES)):
            yield replace(self, decoders_per_prefill=count, replicas=self.replicas // (1 + count))

    @property
    def name(self) -> str:
        """Return the layout and the options that differ from the defaults, in a few words."""
        options = self.options
        parts = [f"TP{options.tensor_parallel_size}"]
        parts += [f"PP{options.pipeline_parallel_size}"] if options.pipeline_parallel_size > 1 else []
        parts += [f"DP{options.data_parallel_size}"] if options.data_parallel_size > 1 else []
        parts += ["EP"] if options.enable_expert_parallel else []
        parts += [options.quantization] if options.quantization else []
        parts += [f"activations {options.activations}"] if options.activations else []
        parts += [f"keys {options.kv_cache_dtype}"] if options.kv_cache_dtype != "auto" else []
        parts += [f"{options.max_num_seqs} seats", f"prefill {options.max_prefill_tokens}"]
        parts += [f"{options.micro_batches} micro-batches"] if options.micro_batches else []
        parts += [f"{options.max_decode_steps} steps"] if options.max_decode_steps > 1 else []
        parts += [f"{options.max_draft_tokens} guesses"] if options.max_draft_tokens else []
        parts += [f"prefill apart, 1 for {self.decoders_per_prefill}"] if self.decoders_per_prefill else []
        return ", ".join(parts)

    def start_commands(self, model: str | None, flags: Sequence[str] = ()) -> list[str]:
        """Return the command that starts each engine of one replica. Each command also has `flags`."""
        start = ["duetto", "serve", *(["--model", model] if model else []), *flags]
        if not self.decoders_per_prefill:
            return [self._command(start, self.options)]
        roles = "prefill", *["decode"] * self.decoders_per_prefill
        return [
            self._command(start, replace(self.options, kv_role=r, kv_address=PREFILL_ADDRESS)) for r in roles
        ]

    def _command(self, start: Sequence[str], options: EngineOptions) -> str:
        default, words = EngineOptions(), [*start]
        for f in fields(EngineOptions):
            value = getattr(options, f.name)
            if value != getattr(default, f.name) and f.metadata.get("flag", True):
                words += flag_words(f.name, value)
        return shlex.join(words)


def flag_words(name: str, value: Any) -> list[str]:
    """Return an option as words of a command line."""
    word = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [word if value else f"--no-{word[2:]}"]
    if isinstance(value, tuple):
        return [word, ",".join(map(str, value))]
    return [word, json.dumps(value) if isinstance(value, dict) else str(value)]


@dataclass
class SearchSpace:
    """Candidates for a model on a target.

    base_options: options that candidates change.
    acceptance: probability that a draft token is accepted; None to try no speculation.
    quantised: True to consider 8 bits for weights and keys too.
    fixed_options: options that stay as in the base.
    refused_layouts: layouts that do not fit, each with the reason.

    Parameters and demands are kept by quantisation and key format.
    """

    model: PlannedModel
    base_options: EngineOptions
    efficiency: Efficiency
    acceptance: float | None = None
    quantised: bool = False
    fixed_options: frozenset[str] = frozenset()

    def __post_init__(self):
        if self.model.target.platform != "cpu":
            self.base_options = replace(self.base_options, cpu_kernels=None)
        self._params: dict[str | None, Decoder] = {}
        self._demands: dict[tuple[str | None, str], Demands] = {}
        self.refused_layouts: dict[str, str] = {}  # reasons, by layout

    def try_candidate(self, **changes: Any) -> Candidate | None:
        """Return the base with changes, or None if it does not fit or is not allowed."""
        try:
            return self.build_candidate(**changes)
        except ValueError:
            return None

    def build_candidate(self, **changes: Any) -> Candidate:
        """Return the base with changes. Raises ValueError if it does not fit or is not allowed."""
        options = replace(self.base_options, **changes)
        params = self.params(options.quantization)
        quantise_inputs(params, options.activations)  # raises ValueError if it cannot
        fitted = fit_engine(self.model, options, params)
        adapted_options, sizes = fitted.options, fitted.sizes
        times = RooflineTimes(
            self.demands(adapted_options), self.model.target.peaks, fitted.layout, self.efficiency
        )
        platform, dtype = self.model.target.platform, jnp.dtype(self.model.dtype)
        shapes = engine_shapes(adapted_options, sizes, self.model.config.layers, platform, dtype)
        replicas, acceptance = self.model.target.count // fitted.layout.num_devices, self.acceptance or 0.0
        return Candidate(fitted, times, shapes, replicas, platform, acceptance)

    def params(self, quantization: str | None) -> Decoder:
        if quantization not in self._params:
            self._params[quantization] = self.model.param_shapes(quantization)
        return self._params[quantization]

    def demands(self, options: EngineOptions) -> Demands:
        key = options.quantization, options.kv_cache_dtype
        if key not in self._demands:
            params = self.params(options.quantization)
            self._demands[key] = Demands(self.model.config, params, self.model.dtype, options.kv_cache_dtype)
        return self._demands[key]

    def layout_candidates(self) -> Iterator[Candidate]:
        """Yield a candidate of each layout that fits, in each precision, with the base's knobs."""
        for layout, precision in product(self._layout_changes(), self._precision_changes()):
            try:
                candidate = self.build_candidate(**(layout | precision))
            except ValueError as error:
                self.refused_layouts.setdefault(
                    layout_name(self.base_options, layout | precision), str(error)
                )
            else:
                yield candidate

    def _layout_changes(self) -> list[dict[str, Any]]:
        """Return the layouts that agree with the fixed options. If there is none, return the base's
        layout."""
        base, fixed = vars(self.base_options), [name for name in LAYOUT_OPTIONS if name in self.fixed_options]
        all_layouts = enumerate_layouts(self.model.config, self.model.target.count)
        return [
            layout for layout in all_layouts if all(layout.get(n, base[n]) == base[n] for n in fixed)
        ] or [{}]

    def _precision_changes(self) -> list[dict[str, Any]]:
        """Return changes to each precision: none, and 8 bits in the formats that the target computes with."""
        if not self.quantised:
            return [{}]
        formats = NARROW_FORMATS[self.model.target.platform]
        weights: dict[str, Any] = {"quantization": formats[0]}
        changes = {}, weights, weights | {"kv_cache_dtype": formats[1]}
        return [change for change in changes if self.fixed_options.isdisjoint(change)]

    def variations(self, candidate: Candidate) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield changes of one knob each, as the knob's name and the changed options. Fixed options are not
        changed."""
        return (
            variation
            for variation in self._knob_changes(candidate)
            if self.fixed_options.isdisjoint(variation[1])
        )

    def _knob_changes(self, candidate: Candidate) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield changes of each knob, fixed options included."""
        options = candidate.options
        for seats in SLOT_COUNTS:
            yield "seats", {"max_num_seqs": seats}
        for tokens in PREFILL_TOKENS:
            yield "prefill tokens", {"max_prefill_tokens": tokens}
        for size in (16, 64, 128):
            yield "page size", {"page_size": size}
        if options.pipeline_parallel_size > 1:
            for count in doublings(1, 2 * options.pipeline_parallel_size):
                yield "micro-batches", {"micro_batches": count}
        elif self.acceptance is None or not options.max_draft_tokens:
            yield "decode steps", {"decode_steps": 4}
        if self.acceptance is not None and options.max_decode_steps == 1:
            for draft_count in DRAFT_COUNTS:
                config = {"method": "ngram", "num_speculative_tokens": draft_count}
                yield "speculation", {"speculative_config": config}


LAYOUT_OPTIONS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
)


def layout_name(base_options: EngineOptions, changes: Mapping[str, Any]) -> str:
    """Name a layout, even if its options are not allowed."""
    tensor, stages, data, experts = (
        changes.get(name, getattr(base_options, name)) for name in LAYOUT_OPTIONS
    )
    narrow = [changes[name] for name in ("quantization", "kv_cache_dtype") if name in changes]
    return " ".join([f"TP{tensor} PP{stages} DP{data}", *(["EP"] if experts else []), *narrow])


def enumerate_layouts(config: ModelConfig, devices: int) -> Iterator[dict[str, Any]]:
    """Yield the ways to spread a model over `devices` devices or fewer. They split each layer,
    consecutive layers, or experts between shards with rows of their own."""
    powers = [n for n in doublings(1, devices) if devices % n == 0]
    has_experts = any(isinstance(kind.ffn, Experts) for kind in config.layers)
    for tensor in powers:
        for stages in (n for n in powers if tensor * n <= devices):
            yield {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
        if has_experts and tensor > 1:
            yield {"tensor_parallel_size": tensor, "enable_expert_parallel": True}
        for data in (n for n in powers if has_experts and n > 1 and tensor * n <= devices):
            yield {
                "tensor_parallel_size": tensor, "data_parallel_size": data, "enable_expert_parallel": True,
            }  # fmt: skip
