"""A log's record of a finished request."""

from dataclasses import fields
from typing import Any

import numpy as np

from ....checkpoints.adapters.adapter import Adapter
from ....sampling.checks import ALL_LOGPROBS
from ....sampling.params import NO_TOKEN, SamplingParams
from ...engine.core.request import Request, ScoreLog

# parameters that decide no token, or that have a field in the entry
OMITTED_PARAMS = ("n", "seed", "output_kind")


def request_entry(request: Request, index: int) -> dict[str, Any]:
    """Return a finished request's tokens and the values that decide them.

    index: of the completion
    seed: 32-bit seed of the device's random numbers
    known: number of leading output tokens that came with the request
    end: maximum number of tokens, prompt included
    weights: pairs (index of a generated token, version of the weights from that token on)
    scores, prompt_scores: null unless they were requested
    """
    params = request.params
    return {
        "kind": "request",
        "id": request.id,
        "index": index,
        "prompt": request.prompt,
        "tokens": request.output_tokens,
        "known": request.num_resumed_tokens,
        "params": params_entry(params),
        "seed": request.seed,
        "end": request.end,
        "stop_ids": request.stop_ids,
        "eos_ids": request.eos_ids,
        "bad_words": request.bad_words,
        "score_from": request.score_from,
        "adapter": adapter_entry(request.adapter),
        "weights": request.weights_versions,
        "finish_reason": request.finish_reason,
        "stop_reason": request.stop_reason,
        "preemptions": request.preemptions,
        "cached": request.num_cached_tokens,
        "scores": scores_entry(request.scores, params.logprobs),
        "prompt_scores": scores_entry(request.prompt_scores, params.prompt_logprobs),
    }


def adapter_entry(adapter: Adapter | None) -> dict[str, str] | None:
    """Return an adapter's name and the hash of its weights. Only the weights decide tokens."""
    return None if adapter is None else {"name": adapter.name, "digest": adapter.digest.hex()}


def params_entry(params: SamplingParams) -> dict[str, Any]:
    return {f.name: vars(params)[f.name] for f in fields(params) if f.name not in OMITTED_PARAMS}


def scores_entry(log: ScoreLog, top: int | None) -> dict[str, Any] | None:
    """Return the tokens' log-probabilities and ranks, and ids and log-probabilities of the `top` likeliest
    tokens at each position. Returns None if `top` is None. A number that is not finite becomes null."""
    if top is None:
        return None
    num_top = None if top == ALL_LOGPROBS else top
    entry: dict[str, Any] = {"logprobs": log.logprob, "ranks": log.rank}
    if top:
        ids = [drop_padding(row[:num_top]) for row in log.top_ids]
        entry["top_ids"] = ids
        entry["top_logprobs"] = [
            [float(x) for x in row[: len(row_ids)]]
            for row_ids, row in zip(ids, log.top_logprobs, strict=True)
        ]
    return entry


def drop_padding(ids: np.ndarray) -> list[int]:
    """Return token ids without the padding, `NO_TOKEN`."""
    return ids[ids != NO_TOKEN].tolist()
