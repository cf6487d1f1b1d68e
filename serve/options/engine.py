"""How an engine is sized: every knob with its meaning, its default, and an error that says what to change."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

from ...fields import knob
from ...sampling.checks import ALL, MAX_LOGPROBS
from . import checks
from .checks import round_up
from .speculation import SpeculativeConfig

MAX_DECODE_STEPS = 1024  # a dispatch holds every one of its steps' results
OUTBOX = 1.0  # GiB of pages that wait to be fetched by another engine
FREE = ("seed", "max_logprobs", "node_rank")  # numbers that may be 0 or less
PROCESSES = ("nnodes", "node_rank", "master_addr", "master_port", "distributed_timeout_seconds")
QUANTIZATIONS = ("int8", "int4", "fp8", "dequantize")
# vLLM's names for checkpoints that are stored quantised, and their quant_method
STORED = {
    "awq": "awq", "awq_marlin": "awq", "gptq": "gptq", "gptq_marlin": "gptq", "fbgemm_fp8": "fbgemm_fp8",
    "compressed-tensors": "compressed-tensors", "mxfp4": "mxfp4",
}  # fmt: skip

CHOICES = {
    "load_format": ("auto", "safetensors", "dummy"),
    "generation_config": ("auto", "vllm"),
    "kv_cache_dtype": ("auto", "int8", "fp8_e4m3", "fp8_e5m2", "fp8"),
}


class Load(NamedTuple):
    """Requests that run at the same time, and prompt tokens between two decode steps."""

    seats: int
    prefill_tokens: int


HOST = Load(32, 512)
# By bytes that jax takes of an accelerator's memory (of 80 GiB 59, if it is not told more): where
# weights leave room for the keys of many requests, many are served in the time of one.
ACCELERATORS = {50 << 30: Load(256, 2048), 25 << 30: Load(128, 1024), 0: Load(64, 512)}


@dataclass(frozen=True)
class EngineOptions:
    """Sizes and limits of one engine; None is derived from the model and the device."""

    max_model_len: int | None = knob(
        None, "tokens of one request, prompt and output together; default: the model's own limit"
    )
    max_num_seqs: int | None = knob(
        None,
        "requests that run at the same time; default: 32 on a CPU, by its memory 64 to 256 on an accelerator",
    )
    max_prefill_tokens: int | None = knob(
        None,
        "prompt tokens computed between two decode steps (of each of data_parallel_size), a longer prompt "
        "is read in chunks; "
        "default: the last of prefill_buckets, or 512 on a CPU, by its memory 512 to 2048 on an accelerator",
    )
    prefill_buckets: tuple[int, ...] | None = knob(
        None,
        "lengths that a prompt's chunk is padded to where it is alone, such as 64,192,512; "
        "default: powers of two from 64 on, on accelerators under the contract from 512",
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
    kv_cache_dtype: str = knob(
        "auto",
        "int8, fp8_e4m3 (or fp8) or fp8_e5m2 keep keys and values in 8 bits; auto in the model's dtype",
    )
    pipeline_parallel_size: int = knob(1, "stages of consecutive layers, each on a device of its own")
    micro_batches: int | None = knob(
        None,
        "groups of requests whose steps a pipeline has in flight together, or two parts pass to each other; "
        "default: as many as there are stages or parts",
    )
    experimental_ffn_devices: int | None = knob(
        None,
        "experimental: devices that have the feed-forward layers, next to the one that has all else; "
        "default: they lie together",
    )
    decode_steps: int = knob(1, "decode steps taken in one dispatch while no prompt waits")
    reproducible: bool = knob(True, "a request's bits depend on the request alone; False may narrow decode")
    fixed_products: bool = knob(
        False,
        "products with the same tiles for every number of rows, so that narrow and wide steps have the same "
        "bits: on one Hopper GPU and weights of 16 bits; on a CPU it changes nothing",
    )
    prompt_hold: float | None = knob(
        None,
        "seconds that a prompt may be held back from a free seat, to share its prefill with others; "
        "default: while it saves time (inf) in batches and generate, where nobody waits for a first token; "
        "0 elsewhere",
    )
    enable_prefix_caching: bool = knob(True, "find the pages of prompts that begin alike")
    swap_space: float = knob(
        0.0, "GiB of the host's memory for pages that the cache has no room for any more (default: none)"
    )
    kv_disk_space: float = knob(0.0, "GiB of files for the same, kept for later processes (default: none)")
    kv_disk_path: str | None = knob(None, "folder of those files; default: duetto/pages in your cache")
    kv_role: str | None = knob(
        None,
        "prefill computes prompts for other engines, which fetch their pages; decode has its prompts computed"
        " so; both is two engines in one process (default: prompts are computed where they are asked for)",
    )
    kv_address: str | None = knob(
        None, "host:port where a prefill engine hands over pages; with commas between them, several that a "
        "decode engine asks",
    )  # fmt: skip
    kv_transport: str | None = knob(
        None,
        "how pages go from one engine to the other: shared_memory, tcp, or nixl where both have it, as over "
        "RDMA (default: memory on one host, TCP between hosts)",
    )
    kv_patience: float = knob(
        10.0, "seconds that the first prompt in line waits for its pages; then it is computed here"
    )
    prefill_devices: int | None = knob(
        None,
        "devices of the prefill engine of kv_role both, the first ones; default: the same as the others'",
    )
    decode_devices: int | None = knob(None, "devices of its decode engine, the next ones")
    speculative_config: Mapping[str, Any] | None = knob(
        None, 'how tokens are guessed ahead, such as {"method": "ngram", "num_speculative_tokens": 7}'
    )
    quantization: str | None = knob(
        None,
        "int8, int4 or fp8 weights, or dequantize; default, also under the checkpoint's name (awq, ...): "
        "as it stores them",
    )
    enable_lora: bool = knob(False, "serve adapters (LoRA) beside the model, several in one batch")
    max_loras: int = knob(1, "adapters on the device at once; requests of others wait in line")
    max_lora_rank: int = knob(16, "highest rank of an adapter; higher ones cost memory and time")
    lora_modules: Sequence[str] | None = knob(
        None,
        "adapters that requests may name, each NAME=FOLDER or a JSON object with name, path and "
        "base_model_name; with enable_lora",
        several="NAME=FOLDER",
    )
    split_special_tokens: bool = knob(
        False, "read special tokens in the text of messages as plain text; those of the template stay special"
    )
    max_logprobs: int = knob(
        20,
        "most log-probabilities reported beside a token, -1 for all; more cost memory and time in every step",
    )
    max_grammar_seconds: int = knob(2, "of a processor that compiling a grammar may take; then it is refused")
    max_grammar_mib: int = knob(128, "MiB that compiling a grammar may take, and that all kept ones may")
    tensor_parallel_size: int = knob(1, "devices among which every layer is split")
    data_parallel_size: int = knob(
        1, "devices, or groups that split every layer, among which requests are dealt, each with its cache"
    )
    enable_expert_parallel: bool = knob(False, "split experts by their number on several devices, not each")
    nnodes: int = knob(1, "processes that serve the model together, on a mesh of all their devices")
    node_rank: int = knob(0, "this process's number among them; 0 schedules")
    master_addr: str = knob("127.0.0.1", "where rank 0 is reached")
    master_port: int = knob(29501, "its port; the next one is jax's")
    distributed_timeout_seconds: int = knob(60, "a rank that is silent for so long is lost, and all end")
    cluster_key_file: str | None = knob(
        None,
        "file with a secret that the engines at kv_address, or the processes at master_addr, have in common; "
        "needed where other machines reach that address",
    )
    load_format: str = knob("auto", "auto and safetensors read the weights; dummy draws random ones instead")
    hf_overrides: Mapping[str, Any] | None = knob(
        None, 'fields in place of those of config.json, such as {"rope_scaling": {...}}', flag=False
    )
    generation_config: str = knob(
        "auto",
        "auto takes the model's generation_config.json for sampling; vllm leaves it "
        "and takes vLLM's defaults",
    )
    override_generation_config: Mapping[str, Any] | None = knob(
        None, 'what it would say otherwise, such as {"temperature": 0.6, "max_new_tokens": 256}'
    )
    profiler_config: Mapping[str, Any] | None = knob(
        None, "where start_profile writes: its torch_profiler_dir", flag=False
    )
    audit_log: str | None = knob(None, "file that gets a line of each ended request, for duetto verify")
    seed: int = knob(0, "seed of requests that bring none")
    serve_while_compiling: bool = knob(
        True,
        "on one device: answer with the first compiled programs while the others are compiled; "
        "False waits for all of them",
    )
    use_tqdm_on_load: bool = knob(True, "say on standard error what a start is doing", flag=False)

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type in (int, int | None) and value is not None and f.name not in FREE and value < 1:
                raise ValueError(f"{f.name} {value} is not allowed: 1 or more")
        if self.prompt_hold is not None and not self.prompt_hold >= 0:
            raise ValueError(f"prompt_hold {self.prompt_hold} is not allowed: 0 or more seconds")
        if self.max_logprobs < ALL:
            raise ValueError(f"max_logprobs {self.max_logprobs} is not allowed: 0 or more, or -1 for all")
        if self.quantization not in (None, *QUANTIZATIONS, *STORED):
            raise ValueError(
                f"quantization={self.quantization!r} is not allowed: {', '.join(QUANTIZATIONS)}, or None, "
                "which keeps weights as the checkpoint stores them, "
                f"as do {', '.join(STORED)} for one that is stored so"
            )
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not allowed: {', '.join(allowed)}")
        checks.check_tiers(self)
        checks.check_handover(self)
        checks.check_nodes(self)
        checks.check_shards(self)
        checks.check_key(self)
        checks.check_buckets(self)
        checks.check_lora(self)
        if self.stations > 1:
            self.check_stages(self.stations)
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

    @property
    def has_tiers(self) -> bool:
        """Whether pages are kept beside the pools; they are found by the names that prefix caching gives."""
        return self.enable_prefix_caching and bool(self.swap_space or self.kv_disk_space or self.kv_role)

    @property
    def host_space(self) -> float:
        """GiB of the host's memory for pages; whoever hands them over needs some."""
        return self.swap_space or (OUTBOX if self.kv_role == "prefill" else 0.0)

    @property
    def stations(self) -> int:
        """Groups of devices that a step visits: stages, or attention's and the feed-forward layers'."""
        return 2 if self.experimental_ffn_devices else self.pipeline_parallel_size

    def check_stages(self, count: int) -> None:
        """Raise ValueError for what a pipeline of so many stages, or two parts of each layer, cannot do."""
        checks.check_stages(self, count)

    def require_unstored(self, what: str) -> None:
        """Raise ValueError where `quantization` says how a checkpoint is stored, and there is none."""
        if self.quantization in STORED:
            raise ValueError(f"quantization={self.quantization!r} says how a checkpoint is stored, {what}")

    def patience(self, awaited: bool) -> float:
        """Seconds that a prompt may be held back, whose first token is `awaited` by somebody or not."""
        if self.prompt_hold is None:
            return 0.0 if awaited else math.inf
        return self.prompt_hold

    @cached_property
    def speculation(self) -> SpeculativeConfig:
        return SpeculativeConfig.from_dict(self.speculative_config)

    def recommended(self, stated: Mapping[str, Any]) -> dict[str, Any]:
        """The sampling parameters of a request that brings none, where the model's own file states some."""
        own = {} if self.generation_config == "vllm" else dict(stated)
        override = dict(self.override_generation_config or {})
        if "max_new_tokens" in override:
            override["max_tokens"] = override.pop("max_new_tokens")
        return own | override

    def alternatives(self, V: int) -> int:
        """Log-probabilities that a step reports beside a token, of a vocabulary of V; never fewer than the
        usual ones."""
        return max(MAX_LOGPROBS, V if self.max_logprobs == ALL else min(self.max_logprobs, V))

    def on(self, memory: int | None) -> "EngineOptions":
        """These options on a device with so many bytes of memory, None for a host: what is left open about
        the load is chosen."""
        load = HOST
        if memory is not None:
            load = next(load for least, load in ACCELERATORS.items() if memory >= least)
        last = self.prefill_buckets[-1] if self.prefill_buckets else load.prefill_tokens
        return replace(
            self,
            max_num_seqs=self.max_num_seqs or round_up(load.seats, self.data_parallel_size),
            max_prefill_tokens=self.max_prefill_tokens or last,
        )

    @property
    def seats(self) -> int:
        """Requests that run at the same time: a host's default where nothing is chosen."""
        return self.max_num_seqs or round_up(HOST.seats, self.data_parallel_size)

    @property
    def shard_seats(self) -> int:
        """Those of each of several shards."""
        return self.seats // self.data_parallel_size

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens between two decode steps, likewise."""
        return self.max_prefill_tokens or (self.prefill_buckets or (HOST.prefill_tokens,))[-1]

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
        """Tokens of one sequence that a step computes at most."""
        return most_tokens(self.prefill_tokens, self.decode_steps, self.guesses)


def most_tokens(max_prefill_tokens: int, decode_steps: int, guesses: int) -> int:
    """Tokens of one sequence that a step computes at most."""
    return max(max_prefill_tokens, decode_steps, guesses + 1)
