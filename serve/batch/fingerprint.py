"""What decides a batch's answers beside its input and its own flags: a job with another fingerprint is
another job."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from ...checkpoints import orbax
from ..host.devices import default_device, processor
from ..options.engine import EngineOptions
from ..programs import kept
from ..speculation.beside import find
from .source import file_hash

MODEL_FILES = (".json", ".safetensors", ".jinja", ".model", ".tiktoken", ".txt")
# Whose versions decide which tokens a prompt has, and the bits of what is computed of them.
PACKAGES = ("jax", "jaxlib", "tokenizers", "sentencepiece", "jinja2")
ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_threefry_partitionable",
)

# Options that decide no answer, or are known by more than their values.
ELSEWHERE = (
    "seed", "use_tqdm_on_load", "prompt_hold", "serve_while_compiling", "speculative_config", "swap_space",
    "kv_disk_space", "kv_disk_path", "kv_role", "kv_address", "kv_transport", "kv_patience", "node_rank",
    "master_addr", "master_port", "distributed_timeout_seconds",
)  # fmt: skip


def fingerprint(model: Path, tokenizer: Path | None, dtype: str, options: EngineOptions) -> dict[str, str]:
    """The content of the folders, the engine's flags, the device, versions and settings. Raises OSError."""
    words = {} if tokenizer is None else {"tokenizer": contents(tokenizer)}
    flags = {k: str(v) for k, v in asdict(options).items() if k not in ELSEWHERE}
    return {
        "model": contents(model),
        **words,
        **device(default_device()),
        **versions(),
        **settings(),
        "--dtype": dtype,
        **{f"--{name.replace('_', '-')}": value for name, value in flags.items()},
        **speculation(options),
    }


def contents(folder: Path) -> str:
    """A hash of the files that make a model or a tokenizer. Raises OSError."""
    files = [f for f in folder.iterdir() if f.suffix in MODEL_FILES]
    if orbax.is_orbax(folder):
        files += [f for f in (folder / orbax.PARAMS).rglob("*") if f.is_file()]
    files.sort()
    with ThreadPoolExecutor() as pool:
        hashes = pool.map(file_hash, files)
        listed = [f"{f.relative_to(folder)} {found}" for f, found in zip(files, hashes, strict=True)]
    return sha256(" ".join(listed).encode()).hexdigest()


def device(device: Any) -> dict[str, str]:
    """What of a device decides bits: the runtime that drives it, and where that is the host, its processor
    and cores."""
    found = {"device": device.device_kind, "runtime": " ".join(device.client.platform_version.split())}
    return found | (
        {"cores": str(kept.cores()), "processor": processor_name()} if device.platform == "cpu" else {}
    )


@cache
def processor_name() -> str:
    """The processor's name, and a hash of its instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, 'unknown')} ({sha256(processor().encode()).hexdigest()[:8]})"


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def settings() -> dict[str, str]:
    """jax's and its compiler's, of which those that are not set are left out."""
    environment = {name: os.environ[name] for name in ENVIRONMENT if os.environ.get(name)}
    chosen = {name: str(jax.config.values[name]) for name in SETTINGS if name in jax.config.values}
    return environment | chosen


def speculation(options: EngineOptions) -> dict[str, str]:
    """How tokens are guessed, and the content of the draft model's or the heads' folder instead of its
    name."""
    given = dict(options.speculative_config or {})
    folder = given.pop("model", None)
    flags = {"--speculative-config": json.dumps(given, sort_keys=True, default=str)}
    return flags if folder is None else {**flags, "draft": contents(find(folder))}
