"""Output of a step, and the rows that it samples."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ....model.pooling import Pooled
from ....model.transformer import Observed
from ....model.tree import pytree
from ....sampling.sample import Sampled, Scores


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

    sampled: samples [B, steps], NO_TOKEN if there is none; [R, 1] if `number` is not None.
    prompt: scores [B, T] of a prefill's prompts, else None.
    pooled: pooled hidden states of a prefill, else None.
    observed: observed values of the step's tokens, if any are observed.
    number: int32 [R], number of each sampled row in its batch, or B; None: all rows in their order.
    """

    sampled: Sampled
    prompt: Scores | None
    pooled: Pooled | None = None
    observed: Observed | None = None
    number: Any = None

    def sample_indices(self, B: int, shards: int = 1) -> Sequence[int] | None:
        """Return for each of B rows in every shard its index among the samples, -1 if it has none. None if
        all rows have samples, in their order."""
        if self.number is None:
            return None
        number = np.asarray(self.number).reshape(shards, -1)
        indices = np.full((shards, B + 1), -1)
        samples = np.arange(number.size).reshape(number.shape)
        np.put_along_axis(indices, number, samples, axis=1)  # the last column is of padding
        return indices[:, :B].reshape(-1).tolist()


@pytree
class ForwardOutput:
    """Results of a step before it samples: the rows that sample, and the fields of `Output`."""

    rows: SampleRows
    prompt: Scores | None
    pooled: Pooled | None = None
    observed: Observed | None = None
    number: Any = None  # int32 [R], as in `Output`

    def with_samples(self, sampled: Sampled) -> Output:
        """Return the step's Output."""
        return Output(sampled, self.prompt, self.pooled, self.observed, self.number)
