"""Futures of steps: results of programs that another thread dispatches, or that are dispatched once the masks
of grammars are known."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ....model.draft_pair import EngineParams, target_params
from ....model.transformer import logit_params
from ..steps.output import ForwardOutput, Output


@dataclass
class PendingSample:
    """Output of a step whose tokens are sampled later.

    sample: program that samples.
    forward_output: output of the step's forward pass.
    output: the Output; None before `draw`.
    """

    sample: Callable[..., tuple[Any, Any]]
    forward_output: ForwardOutput
    output: Output | None = None

    def draw(self, params: EngineParams, slots: Any) -> Any:
        """Dispatch the draw of the tokens; returns the slots."""
        slots, sampled = self.sample(logit_params(target_params(params)), slots, self.forward_output.rows)
        self.output = self.forward_output.with_samples(sampled)
        return slots

    def wait_result(self) -> Output:
        """Return the Output, after `draw`."""
        assert self.output is not None, "nothing is drawn yet"
        return self.output


@dataclass(frozen=True)
class SplitStep:
    """Step of two programs, called like one.

    forward: runs the model; returns cache and ForwardOutput.
    sample: samples tokens; returns slots and samples.
    """

    forward: Callable[..., tuple[Any, Any]]
    sample: Callable[..., tuple[Any, Any]]

    def __call__(self, params: Any, cache: Any, slots: Any, batch: Any) -> tuple[Any, Any, Output]:
        cache, forwarded = self.forward(params, cache, slots, batch)
        slots, sampled = self.sample(logit_params(target_params(params)), slots, forwarded.rows)
        return cache, slots, forwarded.with_samples(sampled)

    def run_forward(self, params: Any, cache: Any, slots: Any, batch: Any) -> tuple[Any, PendingSample]:
        """Dispatch the forward pass alone; returns the cache and the pending draw."""
        cache, forwarded = self.forward(params, cache, slots, batch)
        return cache, PendingSample(self.sample, forwarded)


@dataclass(frozen=True)
class StepFuture:
    """Future of the result of a job in another thread, or of a part of the result.

    job: the job's future.
    pick: selects the part.
    """

    job: Future[Any]
    pick: Callable[[Any], Any] = lambda result: result

    def wait_result(self) -> Any:
        return self.pick(self.job.result())

    def part(self, i: int) -> "StepFuture":
        """Return the future of the i-th element of the result."""
        return StepFuture(self.job, lambda result: self.pick(result)[i])

    def then(self, work: Callable[[Any], Any]) -> "StepFuture":
        """Return the future of `work(result)`. The thread that ends the job calls `work`."""
        future: Future[Any] = Future()

        def on_done(job: Future[Any]) -> None:
            try:
                future.set_result(work(self.pick(job.result())))
            except BaseException as error:  # noqa: BLE001 - raised by `wait_result`
                future.set_exception(error)

        self.job.add_done_callback(on_done)
        return StepFuture(future)


def apply_to_result(work: Callable[[Any], Any], result: Any) -> Any:
    """Return `work(result)`, or its future if the result is a future."""
    return result.then(work) if isinstance(result, StepFuture) else work(result)


def wait_result(result: Any) -> Any:
    """Return the result of a future, which has a method `wait_result`, after waiting for it; return any other
    value as it is. Raises what the dispatch raised."""
    wait = getattr(result, "wait_result", None)  # isinstance of a protocol takes 15 us, in every step
    return result if wait is None else wait()
