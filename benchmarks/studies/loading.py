"""Time and host memory of loading a model from a Hugging Face folder and from an Orbax one: prints a markdown
table.

    python benchmarks/studies/loading.py 135m 1b

Each load is a process of its own; its peak is `ru_maxrss` less what the process held before, with jax
started. Files are in the page cache. Random weights in bfloat16 are written to the folder for temporary
files, and removed.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MIB = 1 << 20
DTYPES = ("bfloat16", "float32")


def config_of(name: str):
    """A preset, or "1b": the sizes of Llama 3.2 1B."""
    from duetto.model.config import ModelConfig
    from duetto.serve.planner.roofline.presets import PRESETS

    if name == "1b":
        return ModelConfig.uniform(128256, 2048, 8192, 16, 32, 8, 64, 8192, tied_embeddings=True)
    return PRESETS[name]


def make(name: str, folder: str) -> None:
    """Write the model in both formats."""
    import jax
    import ml_dtypes
    import numpy as np

    from duetto.checkpoints.huggingface import save_hf
    from duetto.model.transformer import decoder_spec
    from duetto.model.tree import is_spec
    from duetto.serve.cli.convert import convert_model

    block = (np.random.default_rng(0).standard_normal(1 << 20) * 0.02).astype(ml_dtypes.bfloat16)
    params = jax.tree.map(
        lambda s: jax.device_put(np.resize(block, s.shape)), decoder_spec(config_of(name)), is_leaf=is_spec
    )
    save_hf(f"{folder}/huggingface", config_of(name), params)
    del params
    convert_model(f"{folder}/huggingface", f"{folder}/orbax")


def load(folder: str, dtype: str) -> dict[str, float]:
    """Load in this process: seconds, and bytes of the parameters and of the peak beyond what was held
    before."""
    import jax
    import jax.numpy as jnp

    from duetto.model.tree import tree_bytes
    from duetto.serve.engine.startup.model_folder import read_model

    if Path(folder).name == "orbax":
        from orbax.checkpoint import v1  # noqa: F401  its import is not loading
    jax.block_until_ready(jnp.zeros(1))
    before, started = peak(), time.perf_counter()
    _, params = read_model(Path(folder), dtype, jax.devices()[0])
    jax.block_until_ready(params)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "bytes": tree_bytes(params), "peak": peak() - before}


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def child(*args: str) -> str:
    return subprocess.run(
        [sys.executable, __file__, "--child", *args], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def measure(name: str, repeats: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        child("make", name, folder)
        for form in ("huggingface", "orbax"):
            disk = sum(f.stat().st_size for f in Path(folder, form).rglob("*") if f.is_file()) / MIB
            for dtype in DTYPES:
                runs = [json.loads(child("load", f"{folder}/{form}", dtype)) for _ in range(repeats)]
                best, held = min(r["seconds"] for r in runs), runs[0]["bytes"] / MIB
                most = max(r["peak"] for r in runs) / MIB
                print(
                    f"| {name} | {form} | {dtype} | {disk:.0f} | {held:.0f} "
                    f"| {best:.2f} | {most:.0f} | {most - held:.0f} |",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure loading.")
    parser.add_argument("models", nargs="*", default=["135m"], help="presets, or 1b (2.5 GB on disk)")
    parser.add_argument(
        "--repeats", type=int, default=3, help="loads of each kind; the fastest counts (default: 3)"
    )
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        work, *rest = args.child
        print(json.dumps({"make": make, "load": load}[work](*rest)))
        return
    print(f"{os.cpu_count()} cores, {os.uname().machine}\n")
    print(
        "| model | folder | loaded as | on disk, MiB | parameters, MiB | seconds | peak, MiB "
        "| beside the parameters, MiB |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in args.models:
        measure(name, args.repeats)


if __name__ == "__main__":
    main()
