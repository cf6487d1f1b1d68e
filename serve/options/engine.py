"""Options of an engine: meaning, default and limits of each."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

from ...option_fields import knob
from ...refusals import ensure
from ...sampling.checks import ALL_LOGPROBS, LOGPROBS_MODES, MAX_LOGPROBS, RAW_LOGPROBS
from . import checks
from .checks import round_up
from .speculation import SpeculativeConfig

MAX_DECODE_STEPS = 1024  # a dispatch holds the results of all of its steps
FEW_ROWS, FEW_ROW_STEPS = 4, 4  # rows of a dispatch that takes several steps by default, and these steps
OUTBOX_GIB = 1.0  # GiB of host memory for pages that another engine has yet to fetch
UNBOUNDED_OPTIONS = ("seed", "max_logprobs", "node_rank")  # numbers that may be 0 or less
PROCESS_OPTIONS = ("nnodes", "node_rank", "master_addr", "master_port", "distributed_timeout_seconds")
ACTIVATIONS = ("int8", "fp8", "auto")
QUANTIZATIONS = ("int8", "int4", "fp8", "dequantize")
# vLLM's names for checkpoints that are stored quantised, and their quant_method
STORED_QUANTIZATIONS = {
    "awq": "awq", "awq_marlin": "awq", "gptq": "gptq", "gptq_marlin": "gptq", "fbgemm_fp8": "fbgemm_fp8",
    "compressed-tensors": "compressed-tensors", "mxfp4": "mxfp4",
    "modelopt": "modelopt", "modelopt_fp4": "modelopt",
}  # fmt: skip

# vLLM's names for ways to read the same weights: the files of a folder say how they are stored
SAME_WEIGHTS = ("hf", "mistral", "fastsafetensors", "instanttensor", "runai_streamer", "sharded_state")
CHOICES = {
    "load_format": ("auto", "safetensors", "dummy", *SAME_WEIGHTS),
    "generation_config": ("auto", "vllm"),
    "kv_cache_dtype": ("auto", "int8", "fp8_e4m3", "fp8_e5m2", "fp8"),
    "logprobs_mode": LOGPROBS_MODES,
    "activations": (None, *ACTIVATIONS),
}


class DeviceLoad(NamedTuple):
    """Load that a device is sized for.

    num_slots: requests that run at the same time.
    prefill_tokens: prompt tokens between two decode steps.
    """

    num_slots: int
    prefill_tokens: int


HOST_LOAD = DeviceLoad(32, 512)
# By the bytes that jax takes of an accelerator's memory (59 of 80 GiB by default): a decode step of many
# requests takes the time of one, as long as the weights leave room for their keys.
ACCELERATOR_LOADS = {50 << 30: DeviceLoad(256, 2048), 25 << 30: DeviceLoad(128, 1024), 0: DeviceLoad(64, 512)}


@dataclass(frozen=True)
class EngineOptions:
    """Sizes and limits of one engine; None is derived from the model and the device."""

    max_model_len: int | None = knob(
        None, "maximum tokens of a request, prompt and output; default: the model's own limit"
    )
    max_num_seqs: int | None = knob(
        None, "maximum requests that run at once; default: 32 on a CPU, 64 to 256 on an accelerator by memory"
    )
    max_prefill_tokens: int | None = knob(
        None,
        "prompt tokens computed between two decode steps, in each data-parallel shard; a longer prompt is "
        "computed in chunks; default: the last of prefill_buckets, or 512 on a CPU, 512 to 2048 on an "
        "accelerator by memory",
    )
    prefill_buckets: tuple[int, ...] | None = knob(
        None,
        "lengths to which the chunk of a single prompt is padded, such as 64,192,512; default: powers of "
        "two from 64, on accelerators from 512 if reproducible",
    )
    max_batched_token_mem: int | None = knob(
        None, "tokens that the KV cache holds; default: what the memory allows"
    )
    max_input_length: int | None = knob(None, "maximum tokens of a prompt; default: max_model_len - 1")
    max_output_length: int | None = knob(
        None, "maximum generated tokens of a request; default: what max_model_len leaves"
    )
    gpu_memory_utilization: float = knob(
        0.9, "fraction of an accelerator's memory for weights, KV cache and temporaries"
    )
    page_size: int = knob(64, "tokens of a page (block) of the KV cache: a divisor or a multiple of 128")
    kv_cache_dtype: str = knob(
        "auto", "type of stored keys and values: int8, fp8_e4m3 (or fp8), fp8_e5m2; auto: the model's dtype"
    )
    pipeline_parallel_size: int = knob(
        1, "pipeline stages of consecutive layers, each on its own device", short="-pp"
    )
    micro_batches: int | None = knob(
        None, "groups of requests whose steps a pipeline has in flight; default: one for each stage or part"
    )
    experimental_ffn_devices: int | None = knob(
        None, "experimental: devices that have only the feed-forward layers; default: none has only those"
    )
    decode_steps: int | None = knob(
        None,
        "decode steps in one dispatch while no prompt waits; default: 1, but 4 for up to 4 requests at once "
        "where CPU kernels read at most 1 GiB of weights in a step",
    )
    reproducible: bool = knob(
        True, "batch invariance: a request's bits depend on that request alone; False may narrow decode"
    )
    batch_invariant_matmul: bool = knob(
        False,
        "matrix products have the same tiles for every number of rows, so narrow and wide steps give the "
        "same bits; for one Hopper GPU and 16-bit weights, without effect on a CPU",
        formerly="fixed_products",
    )
    cpu_kernels: bool | None = knob(
        None,
        "on a CPU, products and attention by duetto's own kernels, whose bits do not depend on the number of "
        "rows; an output matrix that is the embedding too is copied; without effect on accelerators; "
        "default: for a loaded model on x86-64, where they can be built, if they read the "
        "keys of all layers",
    )
    max_prefill_delay: float | None = knob(
        None,
        "maximum seconds that a prompt waits in spite of a free slot, to share its prefill with others; "
        "default: while it saves time (inf) in batch jobs and generate, 0 for streams and add_request",
        formerly="prompt_hold",
    )
    enable_prefix_caching: bool = knob(True, "reuse KV pages of earlier prompts that begin alike")
    swap_space: float = knob(
        0.0, "GiB of host memory for KV offload: pages that no longer fit into the KV cache"
    )
    kv_disk_space: float = knob(0.0, "GiB of disk for KV offload; later processes find these pages too")
    kv_disk_path: str | None = knob(
        None, "folder of the pages on disk; default: duetto/pages in your cache directory"
    )
    kv_role: str | None = knob(
        None,
        "disaggregated prefill: prefill computes prompts for other engines, decode fetches the pages of "
        "its prompts, both is two such engines in one process; default: one engine does all",
    )
    kv_address: str | None = knob(
        None, "host:port of the prefill engine; a decode engine takes several, separated by commas"
    )
    kv_transport: str | None = knob(
        None,
        f"transport of pages that is tried first: {', '.join(checks.KV_TRANSPORTS)}; "
        "default: shared memory on one host, TCP between hosts",
    )
    kv_transfer_timeout: float = knob(
        10.0,
        "seconds that the first queued request waits for its pages; then it is prefilled locally",
        formerly="kv_patience",
    )
    prefill_devices: int | None = knob(
        None, "first devices, for the prefill engine of kv_role both; default: both engines share theirs"
    )
    decode_devices: int | None = knob(None, "next devices, for the decode engine of kv_role both")
    speculative_config: Mapping[str, Any] | None = knob(
        None, 'method that drafts tokens, as {"method": "ngram", "num_speculative_tokens": 7}; default: none'
    )
    quantization: str | None = knob(
        None,
        "int8, int4 or fp8 weights, or dequantize; default, also under the checkpoint's name (awq, ...): "
        "as the checkpoint stores them",
        short="-q",
    )
    activations: str | None = knob(
        None,
        "int8 or fp8: products of quantised projections quantise their input too, each token by itself; "
        "auto: as the checkpoint says; default: inputs keep the model's dtype",
    )
    enable_lora: bool = knob(False, "serve LoRA adapters, several in one batch")
    max_loras: int = knob(1, "maximum LoRA adapters on the device at once; requests for others wait")
    max_lora_rank: int = knob(16, "maximum rank of a LoRA adapter; a higher limit costs memory and time")
    lora_experts: bool = knob(
        False, "LoRA adapters may change routed experts too: a place beside each expert, on one device"
    )
    lora_modules: Sequence[str] | None = knob(
        None,
        "LoRA adapters that requests may name: NAME=FOLDER, or JSON with name, path, base_model_name",
        several="NAME=FOLDER",
    )
    split_special_tokens: bool = knob(
        False, "read special tokens in the text of messages, but not those of the template, as plain text"
    )
    enable_return_routed_experts: bool = knob(
        False, "report the experts of each token, in every layer that has some, with each output", flag=False
    )
    hidden_state_layers: tuple[int, ...] | None = knob(
        None,
        "report hidden states of each token after these numbers of layers, such as 0,8,16, with each output; "
        "0 is the embedding",
        flag=False,
    )
    logits_processors: Sequence[Any] | None = knob(
        None,
        "functions (logits, history, knobs) -> logits that are compiled into the step, or their names; "
        "requests give them numbers in extra_args",
        several="MODULE:FUNCTION",
    )
    max_logprobs: int = knob(
        20, "maximum log-probabilities of a token, -1: all; a higher limit costs memory and time a step"
    )
    logprobs_mode: str = knob(
        RAW_LOGPROBS,
        "log-probabilities of generated tokens: raw_logprobs by the model's logits, or processed_logprobs by "
        "what tokens are drawn from, after biases, penalties, masks, temperature, min_p, top_k and top_p",
    )
    max_grammar_seconds: int = knob(2, "CPU seconds for compiling a grammar; one that needs more is refused")
    max_grammar_mib: int = knob(128, "MiB for compiling a grammar, and for all cached grammars")
    tensor_parallel_size: int = knob(1, "devices over which every layer is sharded", short="-tp")
    data_parallel_size: int = knob(
        1, "shards with requests and a KV cache of their own: devices, or tensor-parallel groups", short="-dp"
    )
    enable_expert_parallel: bool = knob(
        False, "shard the list of experts over the devices, instead of each expert"
    )
    nnodes: int = knob(1, "processes that serve the model together, on one mesh of all their devices")
    node_rank: int = knob(0, "rank of this process, from 0; rank 0 schedules")
    master_addr: str = knob("127.0.0.1", "address of rank 0")
    master_port: int = knob(29501, "port of rank 0; jax uses the next port")
    distributed_timeout_seconds: int = knob(
        60, "seconds of silence after which a rank is lost; all processes then end"
    )
    cluster_key_file: str | None = knob(
        None,
        "file with a secret that engines at kv_address, or processes at master_addr, share; required if "
        "other machines reach that address",
    )
    load_format: str = knob(
        "auto",
        "dummy draws random weights; sharded_state reads a folder of save_params or `duetto convert`; auto, "
        "as all others, reads either kind of folder",
    )
    hf_overrides: Mapping[str, Any] | None = knob(
        None, 'values that replace those of config.json, such as {"rope_scaling": {...}}', flag=False
    )
    generation_config: str = knob(
        "auto", "default sampling: auto reads the model's generation_config.json, vllm has vLLM's defaults"
    )
    override_generation_config: Mapping[str, Any] | None = knob(
        None, 'changes of the default sampling, as {"temperature": 0.6, "max_new_tokens": 256}'
    )
    profiler_config: Mapping[str, Any] | None = knob(
        None, "torch_profiler_dir: the folder that start_profile writes to", flag=False
    )
    audit_log: str | None = knob(None, "file that receives a line for each ended request, for duetto verify")
    seed: int = knob(0, "seed of requests without a seed of their own")
    background_compilation: bool = knob(
        True,
        "on one device, serve while programs are compiled; False compiles all of them first",
        formerly="serve_while_compiling",
    )
    use_tqdm_on_load: bool = knob(True, "report the progress of the start on standard error", flag=False)

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            if (
                f.type in (int, int | None)
                and value is not None
                and f.name not in UNBOUNDED_OPTIONS
                and value < 1
            ):
                raise ValueError(f"{f.name} {value} is not allowed: 1 or more")
        delay, max_logprobs, scheme = self.max_prefill_delay, self.max_logprobs, self.quantization
        ensure(delay is None or delay >= 0, f"max_prefill_delay {delay} is not allowed: 0 or more seconds")
        ensure(
            max_logprobs >= ALL_LOGPROBS,
            f"max_logprobs {max_logprobs} is not allowed: 0 or more, or -1 for all",
        )
        ensure(
            scheme in (None, *QUANTIZATIONS, *STORED_QUANTIZATIONS),
            f"quantization={scheme!r} is not allowed: {', '.join(QUANTIZATIONS)}, or None, which keeps "
            f"weights as the checkpoint stores them, as do {', '.join(STORED_QUANTIZATIONS)} for one that "
            "is stored so",
        )
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            ensure(value in allowed, f"{name}={value!r} is not allowed: {', '.join(map(str, allowed))}")
        for check in checks.OPTION_CHECKS:
            check(self)
        if self.num_device_groups > 1:
            self.check_stages(self.num_device_groups)
        steps, share = self.decode_steps, self.gpu_memory_utilization
        is_possible = steps is None or steps <= MAX_DECODE_STEPS
        ensure(is_possible, f"decode_steps {steps} is not allowed: 1 to {MAX_DECODE_STEPS}")
        is_one = not self.max_draft_tokens or steps in (None, 1)
        ensure(is_one, f"decode_steps {steps} is not allowed with speculative_config: only 1")
        ensure(0 < share <= 1, f"gpu_memory_utilization {share} is not allowed: above 0, at most 1")

    @property
    def has_tiers(self) -> bool:
        """True if pages are stored outside the pools; prefix caching names them."""
        return self.enable_prefix_caching and bool(self.swap_space or self.kv_disk_space or self.kv_role)

    @property
    def host_space(self) -> float:
        """GiB of host memory for pages; a prefill engine needs some until pages are fetched."""
        return self.swap_space or (OUTBOX_GIB if self.kv_role == "prefill" else 0.0)

    @property
    def can_fuse_qkv(self) -> bool:
        """True if the projections to queries, keys and values may be one array.

        Adapters, tiles for each product, and a second engine on other devices need them separate.
        """
        return not (self.enable_lora or self.batch_invariant_matmul or self.kv_role == "both")

    @property
    def num_device_groups(self) -> int:
        """Number of device groups that a step visits: pipeline stages, or the two parts of each layer."""
        return 2 if self.experimental_ffn_devices else self.pipeline_parallel_size

    def check_stages(self, count: int) -> None:
        """Raise ValueError for an option that a pipeline of `count` stages cannot have."""
        checks.check_stages(self, count)

    def refuse_checkpoint_quantization(self, reason: str) -> None:
        """Raise ValueError if `quantization` or `activations` is what a checkpoint says. `reason` says why
        there is none."""
        is_stored = self.quantization in STORED_QUANTIZATIONS
        ensure(not is_stored, f"quantization={self.quantization!r} says how a checkpoint is stored, {reason}")
        ensure(self.activations != "auto", f"activations='auto' is what a checkpoint says, {reason}")

    @property
    def is_observing(self) -> bool:
        """True if steps report values inside the model: then no token is taken from the prefix cache."""
        return self.enable_return_routed_experts or bool(self.hidden_state_layers)

    def prefill_delay(self, is_awaited: bool) -> float:
        """Return the maximum prefill delay in seconds; `is_awaited`: a caller waits for the first token."""
        if self.max_prefill_delay is None:
            return 0.0 if is_awaited else math.inf
        return self.max_prefill_delay

    @cached_property
    def speculation(self) -> SpeculativeConfig:
        return SpeculativeConfig.from_dict(self.speculative_config)

    def default_sampling(self, stated: Mapping[str, Any]) -> dict[str, Any]:
        """Return the default sampling parameters: `stated` ones of the model's file, with the overrides."""
        sampling = {} if self.generation_config == "vllm" else dict(stated)
        override = dict(self.override_generation_config or {})
        if "max_new_tokens" in override:
            override["max_tokens"] = override.pop("max_new_tokens")
        return sampling | override

    def num_logprobs(self, V: int) -> int:
        """Return the number of log-probabilities that a step reports for a token; V is the vocabulary's
        size."""
        return max(MAX_LOGPROBS, V if self.max_logprobs == ALL_LOGPROBS else min(self.max_logprobs, V))

    def with_device_load(self, memory: int | None) -> "EngineOptions":
        """Return these options with the load of a device of `memory` bytes; None stands for a host."""
        load = HOST_LOAD
        if memory is not None:
            load = next(load for min_memory, load in ACCELERATOR_LOADS.items() if memory >= min_memory)
        last = self.prefill_buckets[-1] if self.prefill_buckets else load.prefill_tokens
        return replace(
            self,
            max_num_seqs=self.max_num_seqs or round_up(load.num_slots, self.data_parallel_size),
            max_prefill_tokens=self.max_prefill_tokens or last,
        )

    @property
    def num_slots(self) -> int:
        """Number of requests that run at the same time; the default is a host's."""
        return self.max_num_seqs or round_up(HOST_LOAD.num_slots, self.data_parallel_size)

    @property
    def shard_slots(self) -> int:
        """Number of requests that run at the same time in each data-parallel shard."""
        return self.num_slots // self.data_parallel_size

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens between two decode steps; the default is a host's."""
        return self.max_prefill_tokens or (self.prefill_buckets or (HOST_LOAD.prefill_tokens,))[-1]

    @property
    def max_draft_tokens(self) -> int:
        """Maximum draft tokens of a row in a step; 0 without speculation."""
        return self.speculation.max_draft_tokens

    @property
    def tree_nodes(self) -> int:
        """Tokens of a row that a verification of a token tree computes; 0 without a tree."""
        return 0 if self.speculation.tree is None else self.speculation.tree.num_nodes

    def decode_steps_for(self, rows: int) -> int:
        """Return the decode steps in one dispatch of `rows` rows.

        By default CPU kernels take several steps of few rows. The host's work for a dispatch, which shares
        the CPU's cores, is then done once for all of them.
        """
        if self.decode_steps is not None:
            return self.decode_steps
        is_single = self.max_draft_tokens or self.is_observing or self.num_device_groups > 1
        return FEW_ROW_STEPS if self.cpu_kernels and rows <= FEW_ROWS and not is_single else 1

    @property
    def max_decode_steps(self) -> int:
        """Maximum decode steps in one dispatch."""
        return self.decode_steps_for(1)

    @property
    def max_step_tokens(self) -> int:
        """Maximum tokens of one sequence that a step computes."""
        return max_step_tokens(self.prefill_tokens, self.max_decode_steps, self.max_draft_tokens)


def max_step_tokens(max_prefill_tokens: int, decode_steps: int, max_draft_tokens: int) -> int:
    """Maximum tokens of one sequence that a step computes."""
    return max(max_prefill_tokens, decode_steps, max_draft_tokens + 1)
