"""The keywords of `LLM`: options of ours, and the names that scripts for vLLM give them."""

from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec

from .options import EngineOptions

OTHER_NAMES = {"max_num_batched_tokens": "max_prefill_tokens", "block_size": "page_size"}
# Choices that are made here. Where two values are allowed, neither changes anything: no graph is captured, no code fetched.
FIXED = {
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "enable_chunked_prefill": (True,),
    "kv_cache_dtype": ("auto",),
    "load_format": ("auto", "safetensors"),
    "tokenizer_mode": ("auto",),
    "enforce_eager": (False, True),
    "trust_remote_code": (False, True),
    "disable_log_stats": (True, False),
}


def engine_options(given: Mapping[str, Any]) -> EngineOptions:
    """Keywords as options. Raises TypeError for a name that is none, ValueError for a value that is not allowed."""
    types, options = get_type_hints(EngineOptions), {}
    for name, value in given.items():
        ours = OTHER_NAMES.get(name, name)
        if name in FIXED:
            if value not in FIXED[name]:
                raise ValueError(f"{name}={value!r} is not supported: only {FIXED[name][0]!r}")
        elif ours not in types:
            raise TypeError(
                f"unknown option {name!r}; known are dtype, tokenizer, {', '.join(sorted(types))}"
            )
        elif ours in options:
            raise TypeError(f"{ours} is given under two names: {name} is the second")
        else:
            options[ours] = typed(name, value, types[ours])
    return EngineOptions(**options)


def typed(name: str, value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise TypeError(f"{name}={value!r}: {str(error).replace('Expected', 'expected', 1)}") from None
