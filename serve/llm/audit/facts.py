"""Facts that decide the bits of an engine's answers besides the requests, and exceptions to this contract."""

from dataclasses import replace
from hashlib import sha256
from importlib.metadata import version
from typing import Any

import jax
import numpy as np

from ....kvcache.stages import tree_devices
from ....model.attention import FusedQKV
from ....model.tree import leaves_by_path, map_instances
from ....model.weights.cpu.packed import kernel_ffi_target
from ....model.weights.device_forms import restore_params
from ....sampling.checks import RAW_LOGPROBS
from ...engine.core.engine import Engine
from ...host.identity import gather_facts
from ...kv.offload.realm import choose_canonical_products
from ...options.engine import EngineOptions
from ...text.tokenizer.tokenizer import Tokenizer

# Options that decide an answer's bits: a log's engine is started again with them.
REPLAY_OPTIONS = (
    "max_model_len", "kv_cache_dtype", "quantization", "activations", "batch_invariant_matmul", "cpu_kernels",
    "max_logprobs", "reproducible", "load_format", "hf_overrides", "max_num_seqs", "max_prefill_tokens",
    "page_size", "max_batched_token_mem", "enable_lora", "max_loras", "max_lora_rank", "lora_experts",
    "lora_modules", "logprobs_mode",
)  # fmt: skip


def engine_facts(engine: Engine, options: EngineOptions) -> dict[str, str]:
    """Return versions, device, settings, formats of numbers, and the compiler's choice of matrix products.
    Another engine with the same facts and weights computes the same bits."""
    device = min(tree_devices(engine.params), key=lambda d: d.id)
    canonical, products = choose_canonical_products(engine.programs, options, device)
    return {
        "duetto": version("duetto"),
        "platform": device.platform,
        **gather_facts("audit", device),
        "config": sha256(repr(engine.config.target).encode()).hexdigest(),
        "dtype": str(engine.params.embed.dtype),
        "kv_cache_dtype": options.kv_cache_dtype,
        "quantization": str(options.quantization),
        "fixed_products": str(options.batch_invariant_matmul),
        "cpu_kernels": str(kernel_ffi_target(engine.params)),
        "shapes": ", ".join(map(str, canonical)),
        **({} if products is None else {"products": products}),
        **({"logits_processors": repr(engine.sizes.processors)} if engine.sizes.processors else {}),
        **({} if options.logprobs_mode == RAW_LOGPROBS else {"logprobs_mode": options.logprobs_mode}),
        **({} if options.activations is None else {"activations": options.activations}),
    }


def contract_exceptions(engine: Engine, options: EngineOptions) -> list[str]:
    """Return the reasons why the reproducibility contract does not cover an engine's answers; [] if it
    does."""
    reasons = []
    if not options.reproducible:
        reasons.append("reproducible is False")
    if options.max_draft_tokens and options.speculation.acceptance == "rejection":
        reasons.append("speculation by rejection: what is drawn depends on the guesses")
    if len(tree_devices(engine.params)) > 1:
        reasons.append("several devices")
    return reasons


def replay_options(options: EngineOptions) -> dict[str, Any]:
    return {name: vars(options)[name] for name in REPLAY_OPTIONS}


def hash_tokenizer(tokenizer: Tokenizer | None) -> str | None:
    """Return the SHA-256 of a tokenizer's vocabulary; None without a tokenizer."""
    if tokenizer is None:
        return None
    return sha256(repr(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def hash_weights(params: Any) -> str | None:
    """Return the SHA-256 of all parameters as they were loaded: name, shape, dtype and numbers. Returns None
    if other processes hold a part of them."""
    digest = hasher = sha256()
    # fused projections are split on the host
    params = map_instances(params, FusedQKV, lambda x: replace(x, array=jax.device_get(x.array)))
    for path, leaf in sorted(leaves_by_path(restore_params(params)).items()):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return None
        numbers = np.ascontiguousarray(jax.device_get(leaf))
        hasher.update(f"{path} {numbers.dtype} {numbers.shape} ".encode())
        hasher.update(numbers.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
