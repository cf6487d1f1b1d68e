"""Futures of steps: results of programs that another thread dispatches, or that are dispatched once masks are
there."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ....kvcache.stages import around
from ....model.pair import Params, target_of


@runtime_checkable
class StepResult(Protocol):
    """Future of a result."""

    def arrived(self) -> Any:
        """Wait for the dispatch and return its result. Raises what the dispatch raised."""
        ...


@dataclass
class PendingSample:
    """Output of a decode whose tokens have yet to be drawn from its hidden states, [B,1,D]."""

    program: Callable[..., tuple[Any, Any]]
    batch: Any  # Batch
    hidden: Any  # until they are drawn from
    output: Any = None  # Output

    def draw(self, params: Params, slots: Any) -> Any:
        """Dispatch the draw; returns the slots."""
        slots, self.output = self.program(around(target_of(params)), slots, self.batch, self.hidden)
        self.hidden = None
        return slots

    def arrived(self) -> Any:
        assert self.output is not None, "nothing is drawn yet"
        return self.output


@dataclass(frozen=True)
class DeferredSampling:
    """Decode in two programs, called as other steps are; its output is `PendingSample`."""

    forward: Callable[..., tuple[Any, Any]]
    draw: Callable[..., tuple[Any, Any]]

    def __call__(self, params: Any, cache: Any, slots: Any, batch: Any) -> tuple[Any, Any, PendingSample]:
        cache, hidden = self.forward(params, cache, slots, batch)
        return cache, slots, PendingSample(self.draw, batch, hidden)


@dataclass(frozen=True)
class StepFuture:
    """Future of a result, or of a part of it."""

    job: Future[Any]
    pick: Callable[[Any], Any] = lambda result: result

    def arrived(self) -> Any:
        return self.pick(self.job.result())

    def part(self, i: int) -> "StepFuture":
        return StepFuture(self.job, lambda result: self.pick(result)[i])


def arrived(result: Any) -> Any:
    """Return a result, after waiting for it if it is a future."""
    return result.arrived() if isinstance(result, StepResult) else result
