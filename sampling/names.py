"""Names and values that scripts for vLLM give: the nearest known name of one that is none, and values that ask for nothing."""

import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, TypeVar

T = TypeVar("T")
Table = Mapping[str, tuple[Any, ...]]

# Sampling parameters that are not here, and their values that ask for nothing; the first is what reading one gives.
NEUTRAL: Table = {
    "structured_outputs": (None,),
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


def among(value: Any, allowed: Iterable[Any]) -> bool:
    """Whether a value is one of the allowed; values of other types are not compared."""
    return any(value is x or (isinstance(value, type(x)) and value == x) for x in allowed)


def unknown(what: str, name: str, known: Collection[str], also: Collection[str] = ()) -> str:
    """The sentence that refuses a name, with the nearest of those that are known, or understood `also`."""
    near = get_close_matches(name, [*known, *also], n=1, cutoff=0.6)
    hint = f", did you mean {near[0]!r}?" if near else ";"
    return f"unknown {what} {name!r}{hint} known are {', '.join(known)}"


def check_neutral(name: str, value: Any, table: Table) -> None:
    """Raise ValueError where a value asks for something that is not here."""
    if not among(value, table[name]):
        allowed = " or ".join(map(repr, table[name]))
        raise ValueError(f"{name}={shown(value)} is not supported: only {allowed}")


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def known_names(cls: type[T]) -> type[T]:
    """A dataclass that takes neutral sampling parameters too, and refuses an unknown name with the nearest known one."""
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
