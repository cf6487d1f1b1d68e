"""What a log says of a request that has ended."""

from dataclasses import fields
from typing import Any

import numpy as np

from ....checkpoints.adapters.adapter import Adapter
from ....sampling.checks import ALL
from ....sampling.params import NO_TOKEN, SamplingParams
from ...engine.core.request import Request, ScoreLog

SILENT = ("n", "seed", "output_kind")  # parameters that are told otherwise, or decide nothing


def entry_of(request: Request, index: int) -> dict[str, Any]:
    """All that its tokens follow from, and these; `index` is that of the completion.

    `seed` is the number that the device draws from, `end` the most tokens, prompt included, `weights` from
    which generated token on which version made them. Scores are there where they were asked for.
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
    """An adapter's name, which decides nothing, and the hash of its terms."""
    return None if adapter is None else {"name": adapter.name, "digest": adapter.digest.hex()}


def params_of(params: SamplingParams) -> dict[str, Any]:
    return {f.name: vars(params)[f.name] for f in fields(params) if f.name not in SILENT}


def scores_of(log: ScoreLog, top: int | None) -> dict[str, Any] | None:
    """Log-probabilities and ranks of tokens, and the ids and log-probabilities of the likeliest beside each;
    None where nobody asked for them. A number that is not finite is null."""
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
    """Token ids without the padding behind them."""
    return ids[ids != NO_TOKEN].tolist()
