"""A log's record of a finished request."""

from dataclasses import fields
from typing import Any

import numpy as np

from ....checkpoints.adapters.adapter import Adapter
from ....sampling.checks import ALL
from ....sampling.params import NO_TOKEN, SamplingParams
from ...engine.core.request import Request, ScoreLog

SILENT = ("n", "seed", "output_kind")  # parameters with a field of their own, and those that decide no token


def entry_of(request: Request, index: int) -> dict[str, Any]:
    """Return a request's tokens and all that decides them.

    `index` is that of the completion, `seed` the number that the device draws from, `end` the most tokens,
    prompt included. `weights` are pairs of a generated token's index and the version of the weights from it
    on. Scores are null unless they were requested.
    """
    params = request.params
    return {
        "kind": "request",
        "id": request.id,
        "index": index,
        "prompt": request.prompt,
        "tokens": request.outputs,
        "known": request.known,
        "params": params_of(params),
        "seed": request.seed,
        "end": request.end,
        "stop_ids": request.stop_ids,
        "eos_ids": request.eos_ids,
        "bad_words": request.bad_words,
        "score_from": request.score_from,
        "adapter": adapter_of(request.adapter),
        "weights": request.weights,
        "finish_reason": request.finish_reason,
        "stop_reason": request.stop_reason,
        "preemptions": request.preemptions,
        "cached": request.cached,
        "scores": scores_of(request.scores, params.logprobs),
        "prompt_scores": scores_of(request.prompt_scores, params.prompt_logprobs),
    }


def adapter_of(adapter: Adapter | None) -> dict[str, str] | None:
    """Return an adapter's name, which decides nothing, and the hash of its weights."""
    return None if adapter is None else {"name": adapter.name, "digest": adapter.digest.hex()}


def params_of(params: SamplingParams) -> dict[str, Any]:
    return {f.name: vars(params)[f.name] for f in fields(params) if f.name not in SILENT}


def scores_of(log: ScoreLog, top: int | None) -> dict[str, Any] | None:
    """Return log-probabilities and ranks of tokens, and ids and log-probabilities of the `top` likeliest at
    each place; None if they were not requested. A number that is not finite is null."""
    if top is None:
        return None
    most = None if top == ALL else top
    found: dict[str, Any] = {"logprobs": log.logprob, "ranks": log.rank}
    if top:
        ids = [within(row[:most]) for row in log.top_ids]
        found["top_ids"] = ids
        found["top_logprobs"] = [
            [float(x) for x in row[: len(own)]] for own, row in zip(ids, log.top_logprobs, strict=True)
        ]
    return found


def within(ids: np.ndarray) -> list[int]:
    """Return token ids without padding."""
    return ids[ids != NO_TOKEN].tolist()
