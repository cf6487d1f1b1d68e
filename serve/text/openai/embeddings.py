"""Bodies of requests for embeddings, and replies to them."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....model.pooling import PoolingParams
from ....sampling.params import SamplingParams
from .body_fields import CacheFields, EmbeddingFields, field_names
from .errors import RequestError, require_field
from .tasks import (
    Task,
    drop_neutral_fields,
    list_prompt_values,
    parse_prompt,
    read_cache_salt,
    refuse_unknown_fields,
)

MAX_INPUTS = 2048  # OpenAI's limit
POOLING_FIELDS = frozenset({"dimensions", "normalize", "pooling"})
OTHER_FIELDS = (field_names(EmbeddingFields) | field_names(CacheFields)) - POOLING_FIELDS
EMBEDDING_PARAMS = SamplingParams(max_tokens=1)


@dataclass(frozen=True)
class EmbeddingInputs:
    """Parsed body of a request for embeddings.

    tasks: one for each input
    is_base64: whether embeddings are little-endian float32 in base64
    """

    tasks: list[Task]
    is_base64: bool


def parse_embedding_body(body: Mapping[str, Any]) -> EmbeddingInputs:
    """Parse a body. Raises RequestError naming the field, its value and what is allowed."""
    body = {name: value for name, value in body.items() if value is not None}
    fields = drop_neutral_fields(body, POOLING_FIELDS, OTHER_FIELDS)
    refuse_unknown_fields(fields, POOLING_FIELDS, OTHER_FIELDS)
    model, encoding = body.get("model"), body.get("encoding_format", "float")
    salt = read_cache_salt(body)
    require_field(model is None or isinstance(model, str), "model", model, "a string")
    require_field(encoding in ("float", "base64"), "encoding_format", encoding, "float or base64")
    try:
        params = PoolingParams(**fields)
    except ValueError as error:
        raise RequestError("invalid_request", str(error)) from None
    require_field("input" in body, "input", None, "a string or token ids, or a list of them")
    inputs = list_prompt_values(body["input"])
    require_field(len(inputs) <= MAX_INPUTS, "input", inputs, f"at most {MAX_INPUTS}")
    tasks = [
        Task(
            "embedding", None, EMBEDDING_PARAMS, prompt=parse_prompt("input", value), model=model,
            pooling=params, cache_salt=salt,
        )
        for value in inputs
    ]  # fmt: skip
    return EmbeddingInputs(tasks, encoding == "base64")


def embedding_reply(
    model: str, inputs: EmbeddingInputs, embeddings: Sequence[np.ndarray], prompt_tokens: int
) -> dict[str, Any]:
    """Return the reply with embeddings in the order of their inputs."""
    encode = encode_base64 if inputs.is_base64 else np.ndarray.tolist
    data = [
        {"object": "embedding", "index": i, "embedding": encode(embedding)}
        for i, embedding in enumerate(embeddings)
    ]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def encode_base64(embedding: np.ndarray) -> str:
    return base64.b64encode(embedding.astype("<f4").tobytes()).decode()
