"""Results of programs that another thread dispatches, so that the engine's goes on."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Promised(Protocol):
    """What stands for a result until it is needed."""

    def arrived(self) -> Any:
        """Wait for the dispatch, and give its result. Raises what the dispatch raised."""
        ...


@dataclass(frozen=True)
class Promise:
    """One result of a job."""

    job: Future[Any]
    pick: Callable[[Any], Any] = lambda result: result

    def arrived(self) -> Any:
        return self.pick(self.job.result())

    def part(self, i: int) -> "Promise":
        """The i-th of several results."""
        return Promise(self.job, lambda result: self.pick(result)[i])


def arrived(result: Any) -> Any:
    """A result, waited for if it is promised."""
    return result.arrived() if isinstance(result, Promised) else result
