"""The fingerprint of a batch job: all that decides its answers besides its input and its own flags."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from ....checkpoints import orbax
from ....checkpoints.hub import resolve_draft
from ....cpu_kernels.library import library, target
from ....sampling.custom import sources_of
from ...host.devices import default_device
from ...llm.audit.facts import machine
from ...options.engine import EngineOptions
from ...options.keywords import FORMER
from ...options.lora import modules_of
from .source import file_hash

MODEL_FILES = (".json", ".safetensors", ".jinja", ".model", ".tiktoken", ".txt")

# Options that decide no answer, and those that are known by more than their values.
ELSEWHERE = (
    "seed", "audit_log", "use_tqdm_on_load", "lora_modules", "max_prefill_delay", "background_compilation",
    "speculative_config", "swap_space", "kv_disk_space", "kv_disk_path", "kv_role", "kv_address",
    "kv_transport", "kv_transfer_timeout", "node_rank", "master_addr", "master_port",
    "distributed_timeout_seconds", "cluster_key_file", "logits_processors",
    "enable_return_routed_experts", "hidden_state_layers",
)  # fmt: skip
# Journals and reports have options under the names of their first version: a rename ends no job.
WRITTEN = {name: former for former, name in FORMER.items()}


def fingerprint(model: Path, tokenizer: Path | None, dtype: str, options: EngineOptions) -> dict[str, str]:
    """Return hashes of the folders' contents, the engine's flags, the device, versions and settings. Raises
    OSError."""
    words = {} if tokenizer is None else {"tokenizer": contents(tokenizer)}
    flags = {WRITTEN.get(k, k): str(v) for k, v in asdict(options).items() if k not in ELSEWHERE}
    return {
        "model": contents(model),
        **words,
        **machine(default_device()),
        **kernels(options),
        "--dtype": dtype,
        **{f"--{name.replace('_', '-')}": value for name, value in flags.items()},
        **speculation(options),
        **adapters(options),
        **processors(options),
    }


def kernels(options: EngineOptions) -> dict[str, str]:
    """Return the name of the CPU kernels, if the options ask for them on a CPU."""
    found = library() if options.cpu_kernels and default_device().platform == "cpu" else None
    return {"CPU kernels": target("product", found.isa)} if found and found.isas else {}


def contents(folder: Path) -> str:
    """Return a hash of the files of a model or a tokenizer. Raises OSError."""
    files = [f for f in folder.iterdir() if f.suffix in MODEL_FILES]
    if orbax.is_orbax(folder):
        files += [f for f in (folder / orbax.PARAMS).rglob("*") if f.is_file()]
    files.sort()
    with ThreadPoolExecutor() as pool:
        hashes = pool.map(file_hash, files)
        listed = [f"{f.relative_to(folder)} {found}" for f, found in zip(files, hashes, strict=True)]
    return sha256(" ".join(listed).encode()).hexdigest()


def adapters(options: EngineOptions) -> dict[str, str]:
    """Return the hashes of the adapters that lines may name, by their names."""
    return {
        f"adapter {request.lora_name}": contents(Path(request.lora_path))
        for request in modules_of(options.lora_modules)
    }


def processors(options: EngineOptions) -> dict[str, str]:
    """Return the names of logits processors in their order, with the hashes of their files."""
    found = sources_of(options.logits_processors)
    return {"logits_processors": ", ".join(found)} if found else {}


def speculation(options: EngineOptions) -> dict[str, str]:
    """Return the speculative configuration, with a hash of the draft model's or the heads' folder in place of
    its name."""
    given = dict(options.speculative_config or {})
    folder = given.pop("model", None)
    flags = {"--speculative-config": json.dumps(given, sort_keys=True, default=str)}
    return flags if folder is None else {**flags, "draft": contents(resolve_draft(folder))}
