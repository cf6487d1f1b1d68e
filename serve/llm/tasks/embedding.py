"""Embeddings of texts, through the ordinary requests: a prompt is read, and its hidden states are pooled."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from ....lora.request import Adapters
from ....model.pooling import Pooling, PoolingParams
from ....sampling.params import SamplingParams
from ...text.outputs import EmbeddingOutput, EmbeddingRequestOutput
from .. import vllm
from ..bar import Tqdm
from ..intake import Prompt, listed, one_each
from ..ticket import RequestGroup

if TYPE_CHECKING:
    from ..llm import LLM

READING = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)  # a token is sampled, and left


def embed(
    llm: "LLM",
    prompts: Prompt | Sequence[Prompt],
    *,
    use_tqdm: Tqdm = True,
    pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
    lora_request: Adapters = None,
    tokenization_kwargs: dict[str, Any] | None = None,
) -> list[EmbeddingRequestOutput]:
    """Embeddings of prompts, in their order: hidden states after the last norm, of the last token or the mean
    of all, as the model's authors or `pooling_params` say.

    A prompt has the same bits alone and beside others. Raises ValueError or TypeError for a prompt that
    `generate` refuses, and for more dimensions than the model has.
    """
    vllm.check_all(tokenization_kwargs=tokenization_kwargs)
    texts = listed(prompts)
    given = one_each("pooling_params", pooling_params or PoolingParams(), len(texts))
    adapters = one_each("lora_requests", lora_request, len(texts))
    makes = [
        partial(making(llm, text, params), awaited=False, lora_request=adapter)
        for text, params, adapter in zip(texts, given, adapters, strict=True)
    ]
    tickets = llm._session.tickets_of(makes)
    llm._finish(tickets, use_tqdm)
    return [result(ticket) for ticket in tickets]


def making(llm: "LLM", prompt: Prompt, params: PoolingParams) -> Callable[..., RequestGroup]:
    """What makes the ticket of a prompt to embed. Raises ValueError or TypeError for parameters that are not
    allowed."""
    if not isinstance(params, PoolingParams):
        raise TypeError(f"pooling parameters are PoolingParams, not {type(params).__name__}")
    width = llm.config.hidden_size
    if params.dimensions is not None and params.dimensions > width:
        raise ValueError(f"dimensions {params.dimensions} is not allowed: at most {width}")
    pooling: Any = params.pooling or llm._defaults.pooling or "last"
    if pooling not in get_args(Pooling):
        raise ValueError(f"the model's pooling {pooling!r} is not supported: give 'last' or 'mean'")
    settled = replace(params, pooling=pooling)
    return partial(llm._intake.ticket, prompt=prompt, params=READING, pooling=settled)


def embedding_of(ticket: RequestGroup) -> np.ndarray:
    """Float32 [D], of a ticket that has finished. Raises RuntimeError where it was aborted."""
    pool = ticket.requests[0].pool
    if pool is None or (found := pool.embedding) is None:
        raise RuntimeError(f"embed: request {ticket.id} was aborted")
    return found


def result(ticket: RequestGroup) -> EmbeddingRequestOutput:
    request, output = ticket.requests[0], EmbeddingOutput(embedding_of(ticket).tolist())
    return EmbeddingRequestOutput(ticket.id, output, request.prompt, num_cached_tokens=request.cached)
