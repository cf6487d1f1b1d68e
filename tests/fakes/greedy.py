"""Engines whose programs do not draw: for greedy requests, which need half of what a step takes to trace
and to compile."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from duetto.sampling.sample import Sampled, argmax, empty_scores
from duetto.serve.host import identity
from duetto.serve.runtime.steps import step

OWN = identity.hash_sources([__file__])


@contextmanager
def greedy_programs() -> Iterator[None]:
    """Engines that start here share no programs with others."""

    def marked(_: Any) -> dict[str, str]:
        return {"traced source": f"greedy by {OWN}, of {identity.imported_sources_hash()}"}

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(identity.FACTS, "traced source", marked)
        patch.setattr(step, "sample", likeliest)
        yield


def likeliest(logits: Any, position: Any, slot: Any, live: Any, state: Any) -> Sampled:
    found = empty_scores(len(logits), state.n_top)
    return Sampled(argmax(logits), found.logprob, found.rank, found.top_ids, found.top_logprobs)
