"""Output of a step, and the rows that it samples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from jaxtyping import Int

from ....model.pooling import Pooled
from ....model.transformer import Observed
from ....model.tree import pytree
from ....sampling.sample import Sampled, Scores

PromptResult = Literal["prompt", "pooled"]  # field of `Output` that a program of its own computes
# numbers on the host for such programs: tokens [B,T] to score, NO_TOKEN elsewhere; lengths [B] of pooled rows
PromptInputs = Mapping[PromptResult, Int[np.ndarray, "B *T"]]
NO_PROMPT_INPUTS: PromptInputs = MappingProxyType({})


@pytree
class SampleRows:
    """Rows of a step that sample, R. A row that is not wanted is padding."""

    hidden: Any  # [R,D], hidden state of the row's last token
    slot: Any  # int32 [R]
    position: Any  # int32 [R], position of the sampled token in its sequence
    wanted: Any  # bool [R]


@pytree
class Output:
    """Results of a step for the host.

    sampled: samples [B, steps], NO_TOKEN if there is none; [R, 1] if `row_numbers` is not None.
    prompt: scores [B, T] of a prefill's prompts, if a row asks.
    pooled: pooled hidden states of a prefill's rows, if a row asks.
    observed: observed values of the step's tokens, if any are observed.
    row_numbers: int32 [R], number of each sampled row in its batch, or B; None: all rows in their order.
    hidden: hidden states [B, T, D] of a prefill, until its prompts are scored and pooled.
    """

    sampled: Sampled
    prompt: Scores | None = None
    pooled: Pooled | None = None
    observed: Observed | None = None
    row_numbers: Any = None
    hidden: Any = None

    def with_prompt_results(
        self, programs: Mapping[PromptResult, Callable[..., Any]], params: Any, inputs: PromptInputs
    ) -> "Output":
        """Dispatch the programs that score and pool prompts, with the parameters of logits. Returns the
        output with their results, without hidden states."""
        results = {name: program(params, self.hidden, inputs[name]) for name, program in programs.items()}
        return replace(self, **results, hidden=None)

    def sample_indices(self, B: int, shards: int = 1) -> Sequence[int] | None:
        """Return for each of B rows in every shard its index among the samples, -1 if it has none. None if
        all rows have samples, in their order."""
        if self.row_numbers is None:
            return None
        number = np.asarray(self.row_numbers).reshape(shards, -1)
        indices = np.full((shards, B + 1), -1)
        samples = np.arange(number.size).reshape(number.shape)
        np.put_along_axis(indices, number, samples, axis=1)  # the last column is of padding
        return indices[:, :B].reshape(-1).tolist()


@pytree
class ForwardOutput:
    """Results of a step before it samples: the rows that sample, and the fields of `Output`."""

    rows: SampleRows
    hidden: Any = None
    observed: Observed | None = None
    row_numbers: Any = None

    def with_samples(self, sampled: Sampled) -> Output:
        """Return the step's Output."""
        return Output(sampled, observed=self.observed, row_numbers=self.row_numbers, hidden=self.hidden)
