"""What one NVIDIA GPU reaches, beside what it could: `benchmarks/gpu.sh` runs this; a table is printed, one
JSON file holds it.

Two ceilings are measured first, a copy in the device's memory and a large product in bfloat16; shares are of
these. Parts run in the order of their worth until the time is over, and the file is written after each
figure. `--dry` rehearses: every part on a tiny shape, on any device. Its figures mean nothing, so its file
says that it is dry, and no measured figure joins it. Without it nothing runs where there is no NVIDIA GPU.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from benchmarks.gpu.attention import bench_attention
from benchmarks.gpu.checks import bench_checks
from benchmarks.gpu.eight_bits import bench_eight_bits
from benchmarks.gpu.estimates import bench_classes, bench_estimates, bench_options
from benchmarks.gpu.peers import bench_peers
from benchmarks.gpu.programs import bench_decode, bench_kernels, bench_prefill, bench_reference, bench_steps
from benchmarks.gpu.run import DRY, Row, Run
from benchmarks.gpu.serving import bench_launches, bench_serving
from benchmarks.gpu.training import bench_training
from duetto.model.gpus import gpu_from_device
from duetto.serve.host.devices import default_device

PARTS: dict[str, Callable[[Run], Iterator[Row]]] = {
    "eight_bits": bench_eight_bits,
    "checks": bench_checks,
    "decode": bench_decode,
    "prefill": bench_prefill,
    "kernels": bench_kernels,
    "serving": bench_serving,
    "estimates": bench_estimates,
    "attention": bench_attention,
    "reference": bench_reference,
    "options": bench_options,
    "launches": bench_launches,
    "steps": bench_steps,
    "classes": bench_classes,
    "training": bench_training,
    "peers": bench_peers,
}


def about(dry: bool) -> dict[str, Any]:
    """The device, the versions and the settings that the figures depend on, and whether they mean
    nothing."""

    def known(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    packages = (
        "jax",
        "jaxlib",
        "jax-cuda12-plugin",
        "jax-cuda13-plugin",
        "nvidia-cudnn-cu13",
        "torch",
        "transformers",
    )
    settings = {k: v for k, v in os.environ.items() if k.startswith(("XLA_", "JAX_"))}
    device, gpu = jax.devices()[0], gpu_from_device(jax.devices()[0])
    found = {"date": time.strftime("%Y-%m-%d"), "device": device.device_kind, "settings": settings}
    found |= {"xla_options": gpu.compiler_options()} if gpu else {}
    return found | {p: v for p in packages if (v := known(p))} | ({"dry": True} if dry else {})


def refusal(dry: bool, kept: Any) -> str | None:
    """Return why figures may not join those of a file, or be written at all; None if they may."""
    if not dry and gpu_from_device(jax.devices()[0]) is None:
        return f"{jax.devices()[0].device_kind} is no NVIDIA GPU: nothing is measured; --dry rehearses"
    if kept is not None and kept["about"].get("dry", False) != dry:
        return "the file has dry figures" if kept["about"].get("dry") else "the file has measured figures"
    return None


def shown(row: Row) -> str:
    share = "" if row.share is None else f"{row.share:>8.1%}"
    return f"{row.part:<10} {row.what:<62}{row.value:>12.4g} {row.unit:<10}{share}"


def main() -> str | None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="JSON file to write; figures that it has are kept")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[p for p in PARTS if p != "peers"])
    parser.add_argument("--seconds", type=float, default=400, help="no part is begun later (default: 400)")
    parser.add_argument("--dry", action="store_true", help="a tiny shape, on any device")
    parser.add_argument("--anew", action="store_true", help="drop the figures that the file has")
    args = parser.parse_args()
    default_device()  # duetto's settings of XLA and of the memory go before jax looks for devices
    kept = args.file.exists() and not args.anew
    if reason := refusal(args.dry, json.loads(args.file.read_text()) if kept else None):
        parser.error(reason)
    begin, run = time.monotonic(), DRY if args.dry else Run()
    found = json.loads(args.file.read_text()) if kept else {"about": about(args.dry), "rows": []}
    found["ceilings"] = {"flops": run.peaks.flops16, "bytes": run.peaks.bandwidth}
    print(
        f"{found['about']['device']}: {run.peaks.flops16 / 1e12:.4g} TFLOP/s, "
        f"{run.peaks.bandwidth / 1e9:.4g} GB/s"
    )
    failed: list[str] = []
    for part in args.parts:
        if time.monotonic() - begin > args.seconds:
            print(f"  {part} is left out: the time is over", flush=True)
            continue
        try:
            for row in PARTS[part](run):
                print(shown(row), flush=True)
                found["rows"].append(row._asdict())
                args.file.write_text(json.dumps(found, indent=1) + "\n")
        except Exception:  # noqa: BLE001 - the parts after it are measured all the same
            failed.append(part)
            traceback.print_exc()
    return f"these parts failed: {', '.join(failed)}" if failed else None


if __name__ == "__main__":
    sys.exit(main())
