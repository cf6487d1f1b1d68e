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
from ...host.streams import first_line, warn
from ...runtime.compiled import executable_cache
from ...runtime.compiled.shapes import Sizes
from .kernel_cases import KernelCase, kernel_cases

MOST_OFF = {2: 2.0**-6, 4: 1e-4}  # of the largest number, by bytes of a number
RUNS = 3  # of a kernel, with equal bits
LIMIT = 300.0  # seconds in which a kernel that is compiled has run
HUNG, EARLIER = "did not end within", "at an earlier start it"  # reasons begin with them
T = TypeVar("T")


@dataclass(frozen=True)
class KernelCheck:
    """Result of a check.

    kernel: its name; a kernel may be checked with several sizes.
    reason: why programs do not use it; empty if they do.
    difference: the largest, of the largest number; None if the kernel did not run.
    seconds: of compiling and running it.
    """

    kernel: str
    reason: str = ""
    difference: float | None = None
    seconds: float = 0.0

    @property
    def ran(self) -> bool:
        """True if the check itself has decided, not a rule."""
        return self.seconds > 0

    @property
    def raised(self) -> bool:
        return self.ran and self.difference is None and HUNG not in self.reason

    @property
    def hung(self) -> bool:
        """True if it has just been started and did not end, so its device may never be free again."""
        return self.reason.startswith(HUNG)

    @property
    def kept(self) -> "KernelCheck":
        """The result as later starts read it, which go on without a kernel that hung."""
        return replace(self, reason=f"{EARLIER} {self.reason}") if self.hung else self


KernelChecks = Mapping[str, KernelCheck]


def check_kernels(config: ModelConfig, params: Decoder, sizes: Sizes, anew: bool = False) -> KernelChecks:
    """Return what is known of each kernel that an engine would use, by kernel and sizes, checked now if no
    start has done it, or `anew`. One line says each that is refused. Behind one that hung, the last, nothing
    is checked."""
    every = list(kernel_cases(config, params, sizes))
    if not every:
        return {}
    device = next(iter(params.embed.sharding.addressable_devices))
    facts = executable_cache.environment(device), [case.name for case in every]
    key = executable_cache.combined([], "kernels", *facts)
    found = {} if anew else executable_cache.read(key, dict[str, KernelCheck]) or {}
    if missing := [case for case in every if case.name not in found]:
        with progress.stage("checking kernels", len(missing), progress.PATIENCE) as done:
            found |= {case.name: done(check) for case, check in all_checked(missing, device)}
        # what raised is checked again by the next start, which may have more memory
        executable_cache.write(key, {name: check.kept for name, check in found.items() if not check.raised})
    replaced = {case.kernel.name: case.kernel.replaced_by for case in every}
    for name, check in found.items():
        if check.reason:
            say = warn if check.ran else progress.say
            say(f"{replaced[check.kernel]}: {name} is not used: {check.reason}")
    return found


def refused_by(found: KernelChecks) -> set[str]:
    """Return the kernels that did not pass; rules refuse others wherever they are chosen."""
    return {check.kernel for check in found.values() if check.reason and check.ran}


def require_ended(found: KernelChecks) -> None:
    """Raise RuntimeError for a kernel that hung. The next start does without it."""
    for name, check in found.items():
        if check.hung:
            raise RuntimeError(f"{name} {check.reason}: start again, without it")


def all_checked(cases: list[KernelCase], device: Any) -> Iterator[tuple[KernelCase, KernelCheck]]:
    """Yield cases with their checks, in their order, up to the first that hung. Threads compile them, and
    outlive the caller; the kernels run one after the other, so one that hangs holds up no other's result."""
    futures: list[Future[Callable[[], KernelCheck]]] = [Future() for _ in cases]
    every, stopped = iter(list(zip(futures, cases, strict=True))), Event()

    def work() -> None:
        for future, case in every:
            if stopped.is_set():
                return
            future.set_result(compiled(case, device))

    for _ in range(min(executable_cache.cores() or 1, len(cases))):
        Thread(target=work, name="kernel check", daemon=True).start()
    for case in cases:
        check = futures.pop(0).result()()  # popped, as it holds arrays of the device
        if check.hung:
            stopped.set()
        yield case, check
        if check.hung:
            return


def checked(case: KernelCase, device: Any = None) -> KernelCheck:
    """Compile a case and run it on a device, unless a rule refuses it."""
    return compiled(case, device)()


def compiled(case: KernelCase, device: Any = None) -> Callable[[], KernelCheck]:
    """Compute a case's reference and compile its kernel; return what runs it. A reference that cannot run
    refuses nothing."""
    refused = partial(KernelCheck, case.kernel.name)
    if case.reason is not None:
        return partial(refused, case.reason)
    begin = time.perf_counter()
    with jax.default_device(device):  # a setting of each thread
        try:
            given = case.inputs()
            expected = jax.device_get(case.reference(*given))
        except Exception as error:  # noqa: BLE001 - such as memory that other work takes
            warn(f"{case.name} is not checked: {first_line(error)}")
            return partial(refused, seconds=time.perf_counter() - begin)
        try:
            program = jax.jit(case.run).lower(*given).compile()
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises, the reference serves
            return partial(refused, first_line(error), None, time.perf_counter() - begin)
    spent = time.perf_counter() - begin
    return lambda: compared(case.kernel.name, lambda: jax.device_get(program(*given)), expected, spent)


def compared(kernel: str, run: Callable[[], Any], expected: Any, spent: float) -> KernelCheck:
    """Run a kernel that took `spent` seconds to compile, and compare its results."""
    begin, reason, difference = time.perf_counter(), "", None
    try:
        found, *others = [in_time(run) for _ in range(RUNS)]
        difference, most = largest_difference(found, expected), MOST_OFF[min(found.dtype.itemsize, 4)]
        if difference > most:
            reason = f"it differs from the reference by {difference:.2g} of the largest number"
        elif any(np.asarray(other).tobytes() != np.asarray(found).tobytes() for other in others):
            reason = "its runs have different bits"
    except TimeoutError:
        reason = f"{HUNG} {LIMIT:g} s"
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises, the reference serves
        reason = first_line(error)
    return KernelCheck(kernel, reason, difference, spent + time.perf_counter() - begin)


def in_time(run: Callable[[], T]) -> T:
    """Return what a function returns. Raises TimeoutError after LIMIT; a thread goes on, perhaps for ever."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(run())
        except Exception as error:  # noqa: BLE001 - the caller raises it
            future.set_exception(error)

    Thread(target=work, name="kernel run", daemon=True).start()
    return future.result(LIMIT)


def largest_difference(found: Any, expected: Any) -> float:
    """The largest difference of two arrays, of the largest number expected. Raises ValueError if the first
    has another shape or is not finite."""
    a, b = (np.asarray(x, np.float32) for x in (found, expected))
    if a.shape != b.shape or not np.isfinite(a).all():
        raise ValueError("its result has another shape, or is not finite")
    return float(np.abs(a - b).max() / max(float(np.abs(b).max()), 1e-30))
