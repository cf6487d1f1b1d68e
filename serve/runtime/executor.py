"""Protocol `Executor`: how an engine's calls reach the devices."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ...model.draft_pair import EngineParams, PairConfig
from ...model.embeddings.prompt import EmbeddingSpan
from .compiled.futures import PendingSample
from .compiled.lowering import PromptKey, StepArguments
from .compiled.shapes import Shape, Sizes
from .steps.output import NO_PROMPT_INPUTS, PromptInputs
from .steps.step import SlotContents


@runtime_checkable
class StepPrograms(Protocol):
    """Compiled programs of an engine.

    abstract_arguments: a step's arguments as shapes, with dtypes and placement.
    steps: compiled programs, by shape.
    uptime_seconds: seconds since the start.
    """

    @property
    def config(self) -> PairConfig: ...
    @property
    def sizes(self) -> Sizes: ...
    @property
    def abstract_arguments(self) -> StepArguments: ...
    @property
    def steps(self) -> dict[Shape, Any]: ...
    @property
    def uptime_seconds(self) -> float: ...

    def step_parts(self, shape: Shape, /) -> list[Any]:
        """Return the compiled programs of a step."""
        ...

    def load_or_compile(self, key: PromptKey, /) -> Any:
        """Return a program that scores or pools prompts, after reading or compiling it when first needed."""
        ...

    def matmul_tuning_hash(self, shapes: Iterable[Shape], /) -> str | None:
        """Return a hash of the configuration of matrix products in these shapes; None on a CPU."""
        ...


@runtime_checkable
class Executor(Protocol):
    """Calls of an engine's programs.

    Cache and slots are donated: use only the returned ones. In a pipeline or a group of processes they and
    the output are futures; `futures.wait_result(x)` waits for them.

    programs: the programs.
    can_defer_sampling: True if `run_forward` may be called for a decode of one step.
    """

    @property
    def programs(self) -> StepPrograms: ...
    @property
    def can_defer_sampling(self) -> bool: ...

    def assign_slot(self, slots: Any, slot: np.int32, contents: SlotContents, /) -> Any:
        """Assign a slot to a request; returns the slots."""
        ...

    def load_history(self, slots: Any, /, *history: Any) -> Any:
        """Write the tokens that a request's penalties and bad words look back on; returns the slots."""
        ...

    def load_masks(self, slots: Any, /, *masks: Any) -> Any:
        """Write the masks of the tokens that grammars allow; returns the slots."""
        ...

    def run(
        self,
        shape: Shape,
        arguments: StepArguments,
        batch: Any,
        prompt_inputs: PromptInputs = NO_PROMPT_INPUTS,
        /,
    ) -> tuple[Any, Any, Any]:
        """Dispatch one step, and the programs that score and pool its prompts; returns cache, slots and
        Output."""
        ...

    def run_forward(self, shape: Shape, arguments: StepArguments, batch: Any, /) -> tuple[Any, PendingSample]:
        """Dispatch the forward pass of a step; returns the cache and the pending draw. Call it
        only if `can_defer_sampling`."""
        ...

    def encode(self, arguments: StepArguments, span: EmbeddingSpan, rows: Any, /) -> Any:
        """Dispatch the encoding of a span into rows of the pool of embeddings; returns the pool. Call it only
        if the model has an encoder."""
        ...

    def fresh_arguments(self, params: EngineParams, failure: BaseException | None = None, /) -> StepArguments:
        """Return the parameters with an unused cache and unused slots. They are made after the arrays of a
        step that raised `failure` are released."""
        ...

    def report(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


@dataclass
class NullPrograms:
    """Programs of no device."""

    config: Any
    sizes: Sizes
    abstract_arguments: StepArguments
    steps: dict[Shape, Any] = field(default_factory=dict)
    uptime_seconds: float = 0.0

    def step_parts(self, shape: Shape) -> list[Any]:
        return []

    def load_or_compile(self, key: PromptKey) -> None:
        return None

    def matmul_tuning_hash(self, shapes: Iterable[Shape]) -> None:
        return None


class NullExecutor:
    """Executor without a device: it keeps no state, and a subclass decides which tokens `run` samples."""

    can_defer_sampling = False

    def __init__(self, config: Any, sizes: Sizes):
        nothing: Any = None
        self.programs = NullPrograms(config, sizes, StepArguments(nothing, nothing, nothing))
        self.config, self.sizes = config, sizes

    def assign_slot(self, slots: Any, slot: np.int32, contents: SlotContents) -> Any:
        return slots

    def load_history(self, slots: Any, *history: Any) -> Any:
        return slots

    load_masks = load_history

    def run_forward(self, shape: Shape, arguments: StepArguments, batch: Any) -> tuple[Any, PendingSample]:
        raise NotImplementedError

    def encode(self, arguments: StepArguments, span: EmbeddingSpan, rows: Any) -> Any:
        raise NotImplementedError

    def fresh_arguments(self, params: Any, failure: BaseException | None = None) -> StepArguments:
        return StepArguments(params, None, None)

    def report(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """Do nothing: there is no device to free."""
