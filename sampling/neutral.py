"""vLLM's sampling parameters that are accepted only with values that have no effect."""

import functools
from dataclasses import fields
from typing import Any, TypeVar

from ..refusals import Table, check_neutral, unknown

T = TypeVar("T")

# Sampling parameters that are not here, and their values that ask for nothing, the default first.
NEUTRAL: Table = {
    "guided_decoding": (None,),
    "logits_processors": (None, []),
    "extra_args": (None, {}),
    "logprob_token_ids": (None, []),
    "prompt_logprob_token_ids": (None,),
    "prompt_logprob_start": (None, 0),
    "flat_logprobs": (False,),
    "truncate_prompt_tokens": (None,),
    "stream_interval": (None, 1),
    "skip_clone": (False, True),
    "skip_reading_prefix_cache": (None, False),
    "thinking_token_budget": (None, -1),
    "repetition_detection": (None,),
    "routed_experts_prompt_start": (0,),
    "trace_decode_token_ids": (None,),
    "best_of": (None, 1),
    "use_beam_search": (False,),
    "length_penalty": (1.0, 1),
    "early_stopping": (False,),
}


def known_names(cls: type[T]) -> type[T]:
    """A dataclass that takes neutral sampling parameters too, and refuses an unknown name with the nearest
    known one."""
    names, plain = [f.name for f in fields(cls)], cls.__init__  # type: ignore[arg-type]

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **given: Any) -> None:
        for name in [name for name in given if name not in names]:
            if name not in NEUTRAL:
                raise TypeError(unknown("sampling parameter", name, names))
            check_neutral(name, given.pop(name), NEUTRAL)
        plain(self, *args, **given)

    cls.__init__ = init
    for name, values in NEUTRAL.items():
        setattr(cls, name, values[0])
    return cls
