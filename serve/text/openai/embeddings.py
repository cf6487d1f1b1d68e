"""Bodies of requests for embeddings, and replies to them."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....model.pooling import PoolingParams
from ....sampling.params import SamplingParams
from .bodies import EmbeddingFields, names
from .errors import RequestError, require
from .tasks import Task, listed, prompt_of, refuse_unknown, with_effect

MOST_INPUTS = 2048  # OpenAI's limit
POOLING = frozenset({"dimensions", "normalize", "pooling"})
FIELDS = names(EmbeddingFields) - POOLING
READING = SamplingParams(max_tokens=1)


@dataclass(frozen=True)
class EmbeddingInputs:
    """Texts to embed; `base64` asks for little-endian float32 in base64."""

    tasks: list[Task]
    base64: bool


def inputs_of(body: Mapping[str, Any]) -> EmbeddingInputs:
    """Parse a body. Raises RequestError naming the field, its value and what is allowed."""
    body = {name: value for name, value in body.items() if value is not None}
    fields = with_effect(body, POOLING, FIELDS)
    refuse_unknown(fields, POOLING, FIELDS)
    model, encoding = body.get("model"), body.get("encoding_format", "float")
    require(model is None or isinstance(model, str), "model", model, "a string")
    require(encoding in ("float", "base64"), "encoding_format", encoding, "float or base64")
    try:
        params = PoolingParams(**fields)
    except ValueError as error:
        raise RequestError("invalid_request", str(error)) from None
    require("input" in body, "input", None, "a string or token ids, or a list of them")
    inputs = listed(body["input"])
    require(len(inputs) <= MOST_INPUTS, "input", inputs, f"at most {MOST_INPUTS}")
    tasks = [
        Task("embedding", None, READING, prompt=prompt_of("input", one), model=model, pooling=params)
        for one in inputs
    ]
    return EmbeddingInputs(tasks, encoding == "base64")


def reply(
    model: str, inputs: EmbeddingInputs, embeddings: Sequence[np.ndarray], prompt_tokens: int
) -> dict[str, Any]:
    """Return the reply with embeddings in the order of their inputs."""
    written = encoded if inputs.base64 else np.ndarray.tolist
    data = [
        {"object": "embedding", "index": i, "embedding": written(one)} for i, one in enumerate(embeddings)
    ]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def encoded(embedding: np.ndarray) -> str:
    return base64.b64encode(embedding.astype("<f4").tobytes()).decode()
