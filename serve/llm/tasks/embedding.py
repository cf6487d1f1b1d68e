"""Embeddings of texts, as ordinary requests: a prompt is prefilled, and its hidden states are pooled."""

from collections.abc import Sequence

import numpy as np

from ....lora.request import LoRARequests
from ....model.pooling import PoolingParams
from ...text.outputs import EmbeddingOutput, EmbeddingRequestOutput, GenerationError
from ..input_processor import InputProcessor, PromptInput, broadcast_over_prompts, list_prompts
from ..progress_bar import Tqdm
from ..session import Session
from ..subscription import Subscription


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
    subscriptions = processor.make_subscriptions(texts, prompt_params, None, adapters, is_awaited=False)
    session.submit_and_run(subscriptions, use_tqdm)
    return [make_embedding_output(subscription) for subscription in subscriptions]


def embedding_of(subscription: Subscription) -> np.ndarray:
    """Return the embedding of a subscription that has ended, float32 [D]. Raises RuntimeError if it was
    aborted, GenerationError if the model computed NaN."""
    request = subscription.requests[0]
    if request.has_failed:
        raise GenerationError(f"embed: {request.stop_reason}")
    pool = request.pooler
    if pool is None or (embedding := pool.embedding) is None:
        raise RuntimeError(f"embed: request {subscription.id} was aborted")
    return embedding


def make_embedding_output(subscription: Subscription) -> EmbeddingRequestOutput:
    output = EmbeddingOutput(embedding_of(subscription).tolist())
    return EmbeddingRequestOutput(
        subscription.id, output, subscription.prompt_ids, num_cached_tokens=subscription.num_cached_tokens
    )
