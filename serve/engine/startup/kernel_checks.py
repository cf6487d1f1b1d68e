"""Check of an engine's kernels at its first start: each runs on its device, beside its reference, on small
arrays of the engine's own sizes.

A kernel that raises, computes something else, or other bits each time, is refused: programs are traced
without it. The results are stored beside the programs; `duetto doctor` checks anew.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from threading import Event, Thread
from typing import Any, TypeVar

import jax
import numpy as np

from ....model.config import ModelConfig
from ....model.transformer import Decoder
from ...host import progress
from ...host.devices import num_cores
from ...host.identity import gather_facts, hash_facts
from ...host.streams import error_headline, warn_once
from ...runtime.compiled import executable_cache
from ...runtime.compiled.shapes import Sizes
from .kernel_cases import KernelCase, kernel_cases

MAX_DIFFERENCE = {2: 2.0**-6, 4: 1e-4}  # maximum difference over the largest number, by bytes of a number
NUM_RUNS = 3  # runs of a kernel, which must have equal bits
RUN_SECONDS = 300.0  # maximum seconds of a run of a compiled kernel
HUNG_REASON, EARLIER_REASON = "did not end within", "at an earlier start it"  # first words of reasons
T = TypeVar("T")


@dataclass(frozen=True)
class KernelCheck:
    """Result of a check.

    kernel: name of the kernel, which may be checked with several sizes.
    reason: why programs do not use it; empty if they do.
    difference: largest difference from the reference over the largest number; None if the kernel did not run.
    seconds: time of compiling and running it.
    """

    kernel: str
    reason: str = ""
    difference: float | None = None
    seconds: float = 0.0

    @property
    def was_tried(self) -> bool:
        """True if the kernel was checked; False if a rule had refused it before."""
        return self.seconds > 0

    @property
    def has_raised(self) -> bool:
        return self.was_tried and self.difference is None and HUNG_REASON not in self.reason

    @property
    def has_hung(self) -> bool:
        """True if a run of the kernel has not ended: its device may never be free again."""
        return self.reason.startswith(HUNG_REASON)

    @property
    def as_stored(self) -> "KernelCheck":
        """Result to store for later starts. If the kernel hung, they do without it."""
        return replace(self, reason=f"{EARLIER_REASON} {self.reason}") if self.has_hung else self


KernelChecks = Mapping[str, KernelCheck]


def check_kernels(config: ModelConfig, params: Decoder, sizes: Sizes, is_anew: bool = False) -> KernelChecks:
    """Return the check of each kernel that an engine would use, by kernel and sizes.

    A kernel is checked now if no start has checked it, or if `is_anew`. Each refused kernel is reported in a
    line. After a kernel that hung, none is checked.
    """
    cases = list(kernel_cases(config, params, sizes))
    if not cases:
        return {}
    device = next(iter(params.embed.sharding.addressable_devices))
    key = hash_facts("kernels", gather_facts("program", device), [case.name for case in cases])
    checks = {} if is_anew else executable_cache.read_record(key, dict[str, KernelCheck]) or {}
    if missing := [case for case in cases if case.name not in checks]:
        with progress.show_stage("checking kernels", len(missing), progress.PATIENCE_SECONDS) as done:
            checks |= {case.name: done(check) for case, check in run_kernel_checks(missing, device)}
        # what raised is checked again by the next start, which may have more memory
        executable_cache.write_record(
            key, {name: check.as_stored for name, check in checks.items() if not check.has_raised}
        )
    replaced = {case.kernel.name: case.kernel.fallback for case in cases}
    for name, check in checks.items():
        if check.reason:
            say = warn_once if check.was_tried else progress.write_progress_line
            say(f"{replaced[check.kernel]}: {name} is not used: {check.reason}")
    return checks


def failed_kernel_names(checks: KernelChecks) -> set[str]:
    """Return the names of kernels that failed their check. Rules refuse kernels where these are chosen."""
    return {check.kernel for check in checks.values() if check.reason and check.was_tried}


def require_no_hang(checks: KernelChecks) -> None:
    """Raise RuntimeError for a kernel that hung. The next start does without it."""
    for name, check in checks.items():
        if check.has_hung:
            raise RuntimeError(f"{name} {check.reason}: start again, without it")


def run_kernel_checks(cases: list[KernelCase], device: Any) -> Iterator[tuple[KernelCase, KernelCheck]]:
    """Yield each case with its check, in order, up to the first kernel that hung.

    Threads compile the cases, and may outlive the caller. Kernels run one after another, so that a kernel
    that hangs delays no other's result.
    """
    futures: list[Future[Callable[[], KernelCheck]]] = [Future() for _ in cases]
    queue, stopped = iter(list(zip(futures, cases, strict=True))), Event()

    def compile_next_cases() -> None:
        for future, case in queue:
            if stopped.is_set():
                return
            future.set_result(compile_kernel_case(case, device))

    for _ in range(min(num_cores() or 1, len(cases))):
        Thread(target=compile_next_cases, name="kernel check", daemon=True).start()
    for case in cases:
        check = futures.pop(0).result()()  # popped: a future holds arrays of the device
        if check.has_hung:
            stopped.set()
        yield case, check
        if check.has_hung:
            return


def check_kernel_case(case: KernelCase, device: Any = None) -> KernelCheck:
    """Compile a case and run it on a device, unless a rule refuses it."""
    return compile_kernel_case(case, device)()


def compile_kernel_case(case: KernelCase, device: Any = None) -> Callable[[], KernelCheck]:
    """Compute a case's reference and compile its kernel; returns a function that runs and checks it.

    If the reference cannot run, the kernel is not refused.
    """
    make_check = partial(KernelCheck, case.kernel.name)
    if case.reason is not None:
        return partial(make_check, case.reason)
    begin = time.perf_counter()
    with jax.default_device(device):  # a setting of each thread
        try:
            inputs = case.inputs()
            expected = jax.device_get(case.reference(*inputs))
        except Exception as error:  # noqa: BLE001 - such as too little memory
            warn_once(f"{case.name} is not checked: {error_headline(error)}")
            return partial(make_check, seconds=time.perf_counter() - begin)
        try:
            program = jax.jit(case.run).lower(*inputs).compile()
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises, the reference serves
            return partial(make_check, error_headline(error), None, time.perf_counter() - begin)
    spent = time.perf_counter() - begin
    return lambda: compare_kernel_runs(
        case.kernel.name, lambda: jax.device_get(program(*inputs)), expected, spent
    )


def compare_kernel_runs(kernel: str, run: Callable[[], Any], expected: Any, spent: float) -> KernelCheck:
    """Run a kernel that took `spent` seconds to compile, and compare its results."""
    begin, reason, difference = time.perf_counter(), "", None
    try:
        result, *others = [run_in_time_limit(run) for _ in range(NUM_RUNS)]
        difference = largest_difference(result, expected)
        limit = MAX_DIFFERENCE[min(result.dtype.itemsize, 4)]
        if difference > limit:
            reason = f"it differs from the reference by {difference:.2g} of the largest number"
        elif any(np.asarray(other).tobytes() != np.asarray(result).tobytes() for other in others):
            reason = "its runs have different bits"
    except TimeoutError:
        reason = f"{HUNG_REASON} {RUN_SECONDS:g} s"
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises, the reference serves
        reason = error_headline(error)
    return KernelCheck(kernel, reason, difference, spent + time.perf_counter() - begin)


def run_in_time_limit(run: Callable[[], T]) -> T:
    """Run a function in a thread; returns its result. Raises TimeoutError after RUN_SECONDS, while the
    thread goes on."""
    future: Future[T] = Future()

    def run_in_thread() -> None:
        try:
            future.set_result(run())
        except Exception as error:  # noqa: BLE001 - the caller raises it
            future.set_exception(error)

    Thread(target=run_in_thread, name="kernel run", daemon=True).start()
    return future.result(RUN_SECONDS)


def largest_difference(result: Any, expected: Any) -> float:
    """Return the largest difference of two arrays over the largest expected number.

    Raises ValueError if `result` has another shape or is not finite.
    """
    a, b = (np.asarray(x, np.float32) for x in (result, expected))
    if a.shape != b.shape or not np.isfinite(a).all():
        raise ValueError("its result has another shape, or is not finite")
    return float(np.abs(a - b).max() / max(float(np.abs(b).max()), 1e-30))
