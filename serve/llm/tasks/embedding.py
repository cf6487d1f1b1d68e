"""Embeddings of texts, as ordinary requests: a prompt is prefilled, and its hidden states are pooled."""

from collections.abc import Sequence

import numpy as np

from ....lora.request import LoRARequests
from ....model.pooling import PoolingParams
from ...text.outputs import EmbeddingOutput, EmbeddingRequestOutput, GenerationError
from ..input_processor import InputProcessor, PromptInput, broadcast_over_prompts, list_prompts
from ..progress_bar import Tqdm
from ..request_group import RequestGroup
from ..session import Session


def embed_prompts(
    session: Session,
    processor: InputProcessor,
    prompts: PromptInput | Sequence[PromptInput],
    params: PoolingParams | Sequence[PoolingParams] | None,
    adapters: LoRARequests,
    use_tqdm: Tqdm,
) -> list[EmbeddingRequestOutput]:
    """Return embeddings of prompts, in their order: hidden states after the last norm, of the last token or
    the mean of all, as the model's authors or `params` say.

    An embedding's bits do not depend on the batch. Raises ValueError or TypeError for a prompt that
    `generate` refuses, and for more dimensions than the model has.
    """
    texts = list_prompts(prompts)
    prompt_params = broadcast_over_prompts("pooling_params", params or PoolingParams(), len(texts))
    if wrong := [type(value).__name__ for value in prompt_params if not isinstance(value, PoolingParams)]:
        raise TypeError(f"pooling parameters are PoolingParams, not {wrong[0]}")
    group_factories = processor.make_group_factories(texts, prompt_params, None, adapters, awaited=False)
    return [make_embedding_output(group) for group in session.make_and_run_groups(group_factories, use_tqdm)]


def embedding_of(group: RequestGroup) -> np.ndarray:
    """Return the embedding of a group that has ended, float32 [D]. Raises RuntimeError if the group was
    aborted, GenerationError if the model computed NaN."""
    if group.requests[0].has_failed:
        raise GenerationError(f"embed: {group.requests[0].stop_reason}")
    pool = group.requests[0].pooler
    if pool is None or (embedding := pool.embedding) is None:
        raise RuntimeError(f"embed: request {group.id} was aborted")
    return embedding


def make_embedding_output(group: RequestGroup) -> EmbeddingRequestOutput:
    request, output = group.requests[0], EmbeddingOutput(embedding_of(group).tolist())
    return EmbeddingRequestOutput(
        group.id, output, request.prompt, num_cached_tokens=request.num_cached_tokens
    )
