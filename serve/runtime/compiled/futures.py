"""Futures of steps: results of programs that another thread dispatches, or that are dispatched once the masks
of grammars are known."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ....kvcache.stages import outer_params
from ....model.draft_pair import EngineParams, target_params


@runtime_checkable
class WaitableResult(Protocol):
    """Future of the result of a dispatch."""

    def wait_result(self) -> Any:
        """Wait for the dispatch and return its result. Raises what the dispatch raised."""
        ...


@dataclass
class PendingSample:
    """Output of a decode whose tokens are drawn later.

    program: draws tokens from hidden states.
    batch: the decode's Batch.
    hidden: hidden states [B,1,D]; None after the draw.
    output: the Output; None before the draw.
    """

    program: Callable[..., tuple[Any, Any]]
    batch: Any
    hidden: Any
    output: Any = None

    def draw(self, params: EngineParams, slots: Any) -> Any:
        """Dispatch the draw of the tokens; returns the slots."""
        slots, self.output = self.program(outer_params(target_params(params)), slots, self.batch, self.hidden)
        self.hidden = None
        return slots

    def wait_result(self) -> Any:
        """Return the Output, after `draw`."""
        assert self.output is not None, "nothing is drawn yet"
        return self.output


@dataclass(frozen=True)
class DeferredSampling:
    """Decode in two programs, called like any step; its output is a `PendingSample`.

    forward: runs the model; returns cache and hidden states.
    draw: draws tokens from hidden states; returns slots and Output.
    """

    forward: Callable[..., tuple[Any, Any]]
    draw: Callable[..., tuple[Any, Any]]

    def __call__(self, params: Any, cache: Any, slots: Any, batch: Any) -> tuple[Any, Any, PendingSample]:
        cache, hidden = self.forward(params, cache, slots, batch)
        return cache, slots, PendingSample(self.draw, batch, hidden)


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


def wait_result(result: Any) -> Any:
    """Return the result of a future, after waiting for it; return any other value as it is."""
    return result.wait_result() if isinstance(result, WaitableResult) else result
