"""Embeddings of texts, by ordinary requests: a prompt is prefilled, and its hidden states are pooled."""

from collections.abc import Sequence

import numpy as np

from ....lora.request import Adapters
from ....model.pooling import PoolingParams
from ...text.outputs import EmbeddingOutput, EmbeddingRequestOutput
from ..bar import Tqdm
from ..input_processor import InputProcessor, Prompt, listed, one_each
from ..request_group import RequestGroup
from ..session import Session


def embed(
    session: Session,
    processor: InputProcessor,
    prompts: Prompt | Sequence[Prompt],
    params: PoolingParams | Sequence[PoolingParams] | None,
    adapters: Adapters,
    use_tqdm: Tqdm,
) -> list[EmbeddingRequestOutput]:
    """Return embeddings of prompts, in their order: hidden states after the last norm, of the last token or
    the mean of all, as the model's authors or `params` say.

    An embedding's bits do not depend on the batch. Raises ValueError or TypeError for a prompt that
    `generate` refuses, and for more dimensions than the model has.
    """
    texts = listed(prompts)
    given = one_each("pooling_params", params or PoolingParams(), len(texts))
    if wrong := [type(one).__name__ for one in given if not isinstance(one, PoolingParams)]:
        raise TypeError(f"pooling parameters are PoolingParams, not {wrong[0]}")
    makes = processor.makes(texts, given, None, adapters, awaited=False)
    return [result(group) for group in session.complete(makes, use_tqdm)]


def embedding_of(group: RequestGroup) -> np.ndarray:
    """Return float32 [D] of a group that has ended. Raises RuntimeError if it was aborted."""
    pool = group.requests[0].pool
    if pool is None or (found := pool.embedding) is None:
        raise RuntimeError(f"embed: request {group.id} was aborted")
    return found


def result(group: RequestGroup) -> EmbeddingRequestOutput:
    request, output = group.requests[0], EmbeddingOutput(embedding_of(group).tolist())
    return EmbeddingRequestOutput(group.id, output, request.prompt, num_cached_tokens=request.cached)
