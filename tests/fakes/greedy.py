"""Engines whose programs neither draw nor score: for greedy requests, which need half of what a step takes to
trace and to compile."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest

from duetto.sampling.sample import Sampled, Scores, argmax, empty_scores
from duetto.serve.runtime.compiled import executable_cache
from duetto.serve.runtime.steps import step

OWN = executable_cache.hash_sources([__file__])


@contextmanager
def greedy_programs() -> Iterator[None]:
    """Engines that start here share no programs with others."""
    environment = executable_cache.describe_environment

    def marked(device: Any) -> tuple[Any, ...]:
        sources, *others = environment(device)
        return f"greedy by {OWN}, of {sources}", *others

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executable_cache, "describe_environment", marked)
        patch.setattr(step, "sample", likeliest)
        patch.setattr(step, "prompt_scores", unscored)
        yield


def likeliest(logits: Any, position: Any, slot: Any, live: Any, state: Any) -> Sampled:
    found = empty_scores(len(logits), state.n_top)
    return Sampled(argmax(logits), found.logprob, found.rank, found.top_ids, found.top_logprobs)


def unscored(params: Any, config: Any, batch: Any, hidden: Any, since: Any, n_top: int) -> Scores:
    B, T = batch.tokens.shape
    return jax.tree.map(lambda x: x.reshape(B, T, *x.shape[1:]), empty_scores(B * T, n_top))
