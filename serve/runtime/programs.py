"""The seam `StepPrograms`: the device programs behind an engine."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ...model.pair import PairConfig, Params
from .compiled.batches import BatchRow
from .compiled.compile import StepArguments
from .compiled.shapes import Shape, Sizes
from .steps.step import Seat


@runtime_checkable
class StepPrograms(Protocol):
    """Calls that an engine makes in every step.

    Cache and slots are donated: each call consumes those that it is given and returns others. They, and a
    step's output, may be futures (`promise.arrived`). `like` has shapes, types and placement of a step's
    arguments, `steps` the compiled programs; `age` is in seconds since the start. The programs of the slots
    assign one to a request, write the tokens that its penalties and bad words look back on, and the tokens
    that grammars allow.
    """

    @property
    def config(self) -> PairConfig: ...
    @property
    def sizes(self) -> Sizes: ...
    @property
    def like(self) -> StepArguments: ...
    @property
    def steps(self) -> dict[Shape, Any]: ...
    @property
    def age(self) -> float: ...

    def seat(self, slots: Any, slot: np.int32, new: Seat, /) -> Any: ...
    def load_history(self, slots: Any, /, *history: Any) -> Any: ...
    def load_masks(self, slots: Any, /, *masks: Any) -> Any: ...

    def batch(self, shape: Shape, rows: Mapping[int, BatchRow], /) -> Any:
        """Return what `run` takes for these rows."""
        ...

    def run(self, shape: Shape, arguments: StepArguments, batch: Any, /) -> tuple[Any, Any, Any]:
        """Dispatch one call; returns cache, slots and the Output."""
        ...

    def empty(self, params: Params, failed: BaseException | None = None, /) -> StepArguments:
        """Return parameters with an unused cache and unused slots, made after those that a failed step held
        are released."""
        ...

    def products(self, shapes: Iterable[Shape], /) -> str | None:
        """Return a hash of how matrix products in these shapes were configured; None on a CPU."""
        ...

    def report(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


class NullPrograms:
    """Programs without a device: no state is kept, and a subclass decides what `run` samples."""

    age = 0.0

    def __init__(self, config: Any, sizes: Sizes):
        self.config, self.sizes = config, sizes
        self.steps: dict[Shape, Any] = {}
        nothing: Any = None
        self.like = StepArguments(nothing, nothing, nothing)

    def seat(self, slots: Any, slot: np.int32, new: Seat) -> Any:
        return slots

    def load_history(self, slots: Any, *history: Any) -> Any:
        return slots

    load_masks = load_history

    def empty(self, params: Any, failed: BaseException | None = None) -> StepArguments:
        return StepArguments(params, None, None)

    def products(self, shapes: Iterable[Shape]) -> None:
        return None

    def report(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """Do nothing: there is no device to free."""
