"""`duetto doctor`: the device, a model's kernels on it, the rates that it reaches, and what would make it
faster."""

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ...model.draft_pair import target_params
from ...model.gpus import E4M3_CAPABILITY, Gpu, gpu_from_device, target_gpu
from ..engine.startup.kernel_checks import KernelChecks, check_kernels, failed_kernel_names
from ..host.devices import (
    MEMORY_SETTINGS,
    NVIDIA_FILES,
    default_device,
    exists_in_dev,
    memory_limit,
    num_cores,
    processor_name,
)
from ..host.identity import device_facts, package_versions
from ..host.signals import restore_interrupt_handler
from ..planner.engine_plan import EnginePlan, abstract_arguments, plan_engine
from ..planner.roofline.presets import PRESETS
from ..planner.roofline.targets import Peaks, Target, local_target
from ..runtime.compiled import executable_cache
from ..runtime.compiled.jaxcache import enable_compilation_cache
from .common import add_engine_flags, add_model_flags, parse_engine_options

PACKAGES = ("duetto", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu", "absl-py")
DRIVER_FILE = Path("/proc/driver/nvidia/version")
MIN_RATE_SHARE = 0.5  # of the vendor's rate: a device below it is throttled, or shared
GPU_SLOTS = 64  # rows of a step that reads weights for enough tokens to be worth it, on a GPU


class Advice(NamedTuple):
    """A finding. `is_fault`: something is broken, and scripts should stop."""

    is_fault: bool
    text: str


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    parser.add_argument(
        "--shape", choices=sorted(PRESETS), help="a well-known model's sizes instead of --model"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    add_engine_flags(parser, is_alone=True)


def run(args: argparse.Namespace) -> int:
    """Print the findings; returns 1 if a kernel did not pass its check, or a GPU of this machine is not
    used."""
    restore_interrupt_handler()
    options = parse_engine_options(args)
    enable_compilation_cache(None if args.compilation_cache == "none" else args.compilation_cache)
    default_device()
    vendor = local_target()
    where = {"revision": args.revision, "download_dir": args.download_dir}
    plan = plan_engine(args.model, args.shape, args.dtype, options, vendor, None, **where)
    checks = check_kernels(
        plan.config, target_params(abstract_arguments(plan).params), plan.sizes, is_anew=True
    )
    # a device that a kernel holds would never be measured
    measured = None if any(check.has_hung for check in checks.values()) else local_target(measure=True).peaks
    advice = list(find_advice(plan, checks, measured))
    facts = {
        **describe_machine(vendor),
        "model": plan.name,
        "dtype": plan.dtype,
        "cpu_kernels": "; ".join(filter(None, (plan.cpu_kernel_isa, plan.no_cpu_kernels_reason))) or None,
        "max_num_seqs": plan.sizes.max_num_seqs,
        "kernels": {name: asdict(check) for name, check in checks.items()},
        "rates": compare_rates(measured, vendor.peaks),
        "advice": [advice._asdict() for advice in advice],
    }
    print(json.dumps(facts, indent=2) if args.json else render_findings(facts))
    return int(any(advice.is_fault for advice in advice))


def describe_machine(target: Target) -> dict[str, Any]:
    """Return the device and what drives it."""
    device = target.devices[0]
    known_gpu = gpu_from_device(device)
    return {
        **device_facts(device),
        "platform": device.platform,
        "devices": len(jax.local_devices()),
        "capability": known_gpu.capability_text if known_gpu else None,
        "shared_memory": known_gpu.shared_memory if known_gpu else None,
        "memory": memory_limit(device),
        "processor": processor_name(),
        "cores": num_cores(),
        "driver": nvidia_driver(),
        "versions": package_versions(PACKAGES),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "xla_options": known_gpu.compiler_options() if known_gpu else {},
        "programs_kept_in": None if (place := executable_cache.program_folder()) is None else str(place),
    }


def nvidia_driver() -> str | None:
    """Return NVIDIA's line about its driver, if there is one."""
    try:
        return DRIVER_FILE.read_text().splitlines()[0].partition(":")[2].strip()
    except (OSError, IndexError):
        return None


def compare_rates(measured: Peaks | None, vendor: Peaks | None) -> dict[str, dict[str, float | None]]:
    """Return measured operations and bytes a second, with the vendor's if they are known."""
    names = ("flops16", "flops32", "bandwidth") if measured is not None else ()
    return {
        name: {"measured": getattr(measured, name), "vendor": getattr(vendor, name, None)} for name in names
    }


# ---------------------------------------------------------------- what would make it faster


def find_advice(plan: EnginePlan, checks: KernelChecks, measured: Peaks | None) -> Iterator[Advice]:
    """Yield what is broken, and what would make this machine faster."""
    known_gpu, is_host = target_gpu(), plan.target.devices[0].platform == "cpu"
    for name in sorted(failed_kernel_names(checks)):
        yield Advice(True, f"{name} did not pass its check: report it with the line above")
    if is_host and exists_in_dev(NVIDIA_FILES):
        plugins = "jax-cuda13-plugin", "jax-cuda12-plugin"
        what = "the driver is too old for it" if package_versions(plugins) else "jax has no plugin for it"
        yield Advice(
            True, f"an NVIDIA GPU is here and jax does not use it: {what}; try pip install 'jax[cuda12]'"
        )
    if known_gpu is not None:
        yield from gpu_advice(known_gpu, plan)
    if (place := executable_cache.program_folder()) is None:
        yield Advice(
            False, "compiled programs are not kept, so each start compiles: choose --compilation-cache"
        )
    elif not os.access(place, os.W_OK):
        yield Advice(False, f"{place} cannot be written, so each start compiles")
    yield from rate_advice(measured, plan.target.peaks)


def gpu_advice(known_gpu: Gpu, plan: EnginePlan) -> Iterator[Advice]:
    """Yield advice on the options of a plan for this GPU."""
    if plan.dtype == "float32" or (plan.dtype == "bfloat16" and known_gpu.auto_dtype != "bfloat16"):
        yield Advice(False, f"--dtype {known_gpu.auto_dtype} is faster than {plan.dtype} on {known_gpu.name}")
    if find_spec("absl") is None:
        yield Advice(False, "kernels that jax ships need absl: pip install absl-py")
    named = [name for name in MEMORY_SETTINGS if name in os.environ]
    for name in named:
        if float(os.environ[name]) < 0.9:
            yield Advice(
                False, f"{name}={os.environ[name]} leaves memory of the GPU unused: duetto takes 0.95"
            )
    if plan.sizes.max_num_seqs < GPU_SLOTS:
        few = plan.sizes.max_num_seqs
        yield Advice(False, f"max_num_seqs is {few}: a step of {GPU_SLOTS} requests takes little longer")
    if plan.sizes.kv_cache_dtype == "auto" and known_gpu.capability >= E4M3_CAPABILITY:
        yield Advice(
            False, "a cache in 8 bits (--kv-cache-dtype fp8) holds twice the tokens, at a loss of quality"
        )


def rate_advice(measured: Peaks | None, vendor: Peaks | None) -> Iterator[Advice]:
    """Name rates that are far below the vendor's."""
    if measured is None or vendor is None:
        return
    for name, what in (("flops16", "products"), ("bandwidth", "memory")):
        share = getattr(measured, name) / getattr(vendor, name)
        if share < MIN_RATE_SHARE:
            yield Advice(
                False, f"{what} reach {share:.0%} of the vendor's rate: is the GPU shared, or throttled?"
            )


# ---------------------------------------------------------------- for people


def render_findings(facts: dict[str, Any]) -> str:
    """Return the findings as text."""
    lines = [f"{name:<12} {value}" for name, value in summary_lines(facts)]
    lines += [f"{'kernel':<12} {kernel_line(name, check)}" for name, check in facts["kernels"].items()]
    for name, unit, scale in (
        ("flops16", "TFLOP/s", 1e12),
        ("flops32", "TFLOP/s", 1e12),
        ("bandwidth", "GB/s", 1e9),
    ):
        if (rate := facts["rates"].get(name)) is None:
            continue
        beside = "" if rate["vendor"] is None else f" of the vendor's {rate['vendor'] / scale:.4g}"
        lines.append(f"{name:<12} {rate['measured'] / scale:.4g} {unit}{beside}")
    lines += [f"{'fault' if x['is_fault'] else 'advice':<12} {x['text']}" for x in facts["advice"]]
    return "\n".join(lines)


def summary_lines(facts: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    memory = "" if facts["memory"] is None else f", {facts['memory'] / 2**30:.1f} GiB"
    capability = "" if facts["capability"] is None else f", compute capability {facts['capability']}"
    yield "device", f"{facts['devices']} x {facts['device']} ({facts['platform']}){capability}{memory}"
    yield "processor", f"{facts['processor']}, {facts['cores']} cores"
    if facts["cpu_kernels"]:
        yield "cpu_kernels", facts["cpu_kernels"]
    if facts["driver"]:
        yield "driver", facts["driver"]
    yield "versions", ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    yield "model", f"{facts['model']} in {facts['dtype']}, {facts['max_num_seqs']} requests at once"
    place = facts["programs_kept_in"]
    yield "programs", "not kept" if place is None else f"kept in {place}"
    if not facts["kernels"]:
        yield "kernels", "none: they are for NVIDIA GPUs"


def kernel_line(name: str, check: dict[str, Any]) -> str:
    if check["reason"]:
        return f"{name}: not used: {check['reason']}"
    off, seconds = check["difference"], check["seconds"]
    return f"{name}: used; off by {off:.1e} of the largest number, checked in {seconds:.1f} s"
