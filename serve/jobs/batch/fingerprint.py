"""The fingerprint of a batch job: the facts that decide its answers, except its input and its own flags."""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from ....checkpoints import orbax
from ....checkpoints.hub import resolve_draft
from ....checkpoints.huggingface import read_config
from ....cpu_kernels.library import ffi_target_name, load_library
from ....sampling.custom_processors import hash_functions
from ...host.devices import default_device
from ...host.identity import gather_facts
from ...options.engine import EngineOptions
from ...options.keywords import FORMER_NAMES
from ...options.lora import parse_lora_modules
from .job_input import hash_file

MODEL_FILES = (".json", ".safetensors", ".jinja", ".model", ".tiktoken", ".txt")

# Options that decide no answer, and options whose folders or functions are hashed instead of their values.
IGNORED_OPTIONS = (
    "seed", "audit_log", "use_tqdm_on_load", "lora_modules", "max_prefill_delay", "background_compilation",
    "speculative_config", "swap_space", "kv_disk_space", "kv_disk_path", "kv_role", "kv_address",
    "kv_transport", "kv_transfer_timeout", "node_rank", "master_addr", "master_port",
    "distributed_timeout_seconds", "cluster_key_file", "logits_processors",
    "enable_return_routed_experts", "hidden_state_layers",
)  # fmt: skip
# Journals and reports have options under the names of their first version: a rename ends no job.
JOURNAL_NAMES = {name: former for former, name in FORMER_NAMES.items()}


def job_fingerprint(
    model: Path, tokenizer: Path | None, dtype: str, options: EngineOptions
) -> dict[str, str]:
    """Return the fingerprint by names of facts: hashes of folders, the engine's flags, device, versions and
    settings. Raises OSError."""
    tokenizer_hash = {} if tokenizer is None else {"tokenizer": hash_folder(tokenizer)}
    return {
        "model": hash_folder(model),
        **tokenizer_hash,
        **gather_facts("job", default_device()),
        **kernel_facts(options),
        "--dtype": dtype,
        **flag_facts(options),
        **speculation_facts(options),
        **adapter_hashes(options),
        **processor_facts(model, options),
    }


def flag_facts(options: EngineOptions) -> dict[str, str]:
    """Return the values of the options that decide answers, by flags."""
    flags = {JOURNAL_NAMES.get(k, k): str(v) for k, v in asdict(options).items() if k not in IGNORED_OPTIONS}
    return {f"--{name.replace('_', '-')}": value for name, value in flags.items()}


def fingerprint_differences(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Return a line of text for each fact in which two fingerprints differ; "" if they are equal.

    A flag that is not in one, because another version wrote it, has its default there.
    """
    defaults = flag_facts(EngineOptions())
    old, new = defaults | {**old}, defaults | {**new}
    names = [name for name in old | new if old.get(name) != new.get(name)]
    return "\n".join(f"  {n}: was {old.get(n, 'not set')}, is {new.get(n, 'not set')}" for n in names)


def kernel_facts(options: EngineOptions) -> dict[str, str]:
    """Return the name of the CPU kernels; empty on an accelerator, or if the options do not enable them."""
    kernel_library = load_library() if options.cpu_kernels and default_device().platform == "cpu" else None
    return (
        {"CPU kernels": ffi_target_name("product", kernel_library.isa)}
        if kernel_library and kernel_library.isas
        else {}
    )


def hash_folder(folder: Path) -> str:
    """Return the SHA-256 of the names and contents of a model's or a tokenizer's files. Raises OSError."""
    files = [f for f in folder.iterdir() if f.suffix in MODEL_FILES]
    if orbax.is_orbax(folder):
        files += [f for f in (folder / orbax.PARAMS_FOLDER).rglob("*") if f.is_file()]
    files.sort()
    with ThreadPoolExecutor(thread_name_prefix="duetto-hash-files") as pool:
        hashes = pool.map(hash_file, files)
        entries = [f"{f.relative_to(folder)} {digest}" for f, digest in zip(files, hashes, strict=True)]
    return sha256(" ".join(entries).encode()).hexdigest()


def adapter_hashes(options: EngineOptions) -> dict[str, str]:
    """Return the hash of each adapter's folder, by the name that a line gives as its model."""
    return {
        f"adapter {request.lora_name}": hash_folder(Path(request.lora_path))
        for request in parse_lora_modules(options.lora_modules)
    }


def processor_facts(model: Path, options: EngineOptions) -> dict[str, str]:
    """Return the names of the logits processors in order, each with a hash of its computation for this model.
    Raises ValueError or TypeError for a function that an engine refuses."""
    if not options.logits_processors:
        return {}
    config = read_config(model)
    longest = options.max_model_len or config.max_position
    return {
        "logits_processors": ", ".join(hash_functions(options.logits_processors, config.vocab_size, longest))
    }


def speculation_facts(options: EngineOptions) -> dict[str, str]:
    """Return the speculative configuration, with the hash of the draft's folder in place of its name."""
    settings = dict(options.speculative_config or {})
    folder = settings.pop("model", None)
    flags = {"--speculative-config": json.dumps(settings, sort_keys=True, default=str)}
    return flags if folder is None else {**flags, "draft": hash_folder(resolve_draft(folder))}
