"""Speculative decoding: the keys of `speculative_config`, under vLLM's names."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_type_hints

from ... import refusals
from ...neutral_values import DRAFTING_KEYS, drop_neutral
from ...option_fields import convert_field, knob
from ...sampling.token_tree import TokenTree

MAX_DRAFT_TOKENS = 64
METHODS = {
    "none": "no speculation",
    "ngram": "tokens that followed the same n-gram earlier in the request",
    "suffix": "tokens that followed it most often in the request and in finished outputs",
    "draft_model": "a small model with the same tokenizer",
    "heads": "a trained head on the model's last hidden state",
    "tree": "the likeliest tokens of a head or draft model, several at a position",
}
METHODS_WITH_MODEL = ("draft_model", "heads", "tree")


def declare_key(default: Any, methods: tuple[str, ...], help: str) -> Any:
    """Declare a key of some `methods`, or of all if none is named."""
    return knob(default, help, methods=methods)


@dataclass(frozen=True)
class SpeculativeConfig:
    """A method of drafting and verifying tokens. A method's own keys are refused with every other method.

    Raises ValueError (a value is not allowed) or TypeError (a wrong type or an unknown key); the message
    names the key, its value and what is allowed.
    """

    method: str | None = declare_key(None, (), "method that drafts tokens; default with a model: draft_model")
    num_speculative_tokens: int = declare_key(
        4, (), f"maximum draft tokens of a step (1..{MAX_DRAFT_TOKENS})"
    )
    acceptance: str = declare_key(
        "coupled", (), "coupled: the same tokens as without speculation; rejection: the same distribution"
    )
    adaptive: bool = declare_key(
        True, (), "let a controller draft fewer tokens, or none where drafting costs more than it saves"
    )
    model: str | None = declare_key(None, METHODS_WITH_MODEL, "folder of the draft model or of the heads")
    prompt_lookup_max: int | None = declare_key(
        None, ("ngram",), "longest n-gram that is looked up; default 3"
    )
    prompt_lookup_min: int | None = declare_key(
        None, ("ngram",), "shortest n-gram; default as the longest, or 1 without either"
    )
    suffix_decoding_max_tree_depth: int = declare_key(24, ("suffix",), "maximum tokens of a match")
    suffix_decoding_max_cached_tokens: int = declare_key(
        100_000, ("suffix",), "maximum tokens of finished outputs that are kept"
    )
    suffix_decoding_max_spec_factor: float = declare_key(
        1.0, ("suffix",), "maximum draft tokens for each token of a match"
    )
    suffix_decoding_min_token_prob: float = declare_key(
        0.1, ("suffix",), "minimum frequency of a draft token together with all before it"
    )
    speculative_token_tree: tuple[tuple[int, ...], ...] | None = declare_key(
        None, ("tree",), "paths of child numbers, such as [[0], [1], [0, 0]]"
    )

    def __post_init__(self):
        check_speculative_config(self)

    @cached_property
    def tree(self) -> TokenTree | None:
        """The tree of draft tokens; None if a draft is a chain."""
        if self.method != "tree":
            return None
        if self.speculative_token_tree is None:
            return TokenTree.from_acceptance(self.num_speculative_tokens)
        return TokenTree.from_paths(self.speculative_token_tree)

    @property
    def max_draft_tokens(self) -> int:
        """Maximum draft tokens of a row that can be accepted; 0 without speculation."""
        if self.method == "none":
            return 0
        return self.num_speculative_tokens if self.tree is None else self.tree.depth

    @classmethod
    def from_dict(cls, values: "Mapping[str, Any] | SpeculativeConfig | None") -> "SpeculativeConfig":
        """Return the configuration of a JSON object; None and {} are no speculation."""
        if isinstance(values, SpeculativeConfig):
            return values
        types, keywords = get_type_hints(cls), drop_neutral("speculative", values or {})
        items = [(key, value) for key, value in keywords.items() if key not in DRAFTING_KEYS]
        for key, _ in items:
            if key not in types:
                raise TypeError(f"speculative_config: {refusals.unknown_name_message('key', key, types)}")
        fields = {key: convert_field(f"speculative_config: {key}", value, types[key]) for key, value in items}
        if fields.get("method") is None:
            if fields and fields.get("model") is None:
                raise ValueError(f"speculative_config: method is missing; allowed are {', '.join(METHODS)}")
            fields["method"] = "draft_model" if fields else "none"
        if fields["method"] == "ngram":
            fields |= fill_ngram_lengths(fields.get("prompt_lookup_min"), fields.get("prompt_lookup_max"))
        return cls(**fields)


def fill_ngram_lengths(shortest: int | None, longest: int | None) -> dict[str, int]:
    """Return both lengths of an n-gram. As in vLLM, a missing one equals the other."""
    if shortest is None:
        shortest, longest = (1, 3) if longest is None else (longest, longest)
    return {"prompt_lookup_min": shortest, "prompt_lookup_max": shortest if longest is None else longest}


def check_speculative_config(c: SpeculativeConfig) -> None:
    """Raise ValueError for a value that is not allowed, or for a key that the method does not have."""

    def require(ok: bool, key: str, allowed: str) -> None:
        refusals.ensure(ok, f"speculative_config: {key}={getattr(c, key)!r} is not allowed: {allowed}")

    require(c.method in METHODS, "method", ", ".join(METHODS))
    for key, f in SpeculativeConfig.__dataclass_fields__.items():
        methods = f.metadata["methods"]
        unset = getattr(c, key) == f.default or not methods or c.method in methods
        require(unset, key, f"only with method {' or '.join(methods)}")
    limits = f"1 to {MAX_DRAFT_TOKENS}"
    require(1 <= c.num_speculative_tokens <= MAX_DRAFT_TOKENS, "num_speculative_tokens", limits)
    require(c.acceptance in ("coupled", "rejection"), "acceptance", "coupled or rejection")
    has_model = c.method not in METHODS_WITH_MODEL or c.model is not None
    require(has_model, "model", f"a folder, with method {c.method}")
    if c.method == "ngram":
        low, high = c.prompt_lookup_min, c.prompt_lookup_max
        require(low is not None and low >= 1, "prompt_lookup_min", "1 or more")
        ok = low is not None and high is not None and high >= low
        require(ok, "prompt_lookup_max", f"at least prompt_lookup_min ({low})")
    if c.speculative_token_tree is not None:
        try:
            nodes = TokenTree.from_paths(c.speculative_token_tree).num_nodes
        except ValueError as error:
            raise ValueError(f"speculative_config: speculative_token_tree: {error}") from None
        require(1 < nodes <= MAX_DRAFT_TOKENS + 1, "speculative_token_tree", f"{limits} paths")
    for key in ("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_tokens"):
        require(getattr(c, key) >= 1, key, "1 or more")
    require(c.suffix_decoding_max_spec_factor > 0, "suffix_decoding_max_spec_factor", "above 0")
    require(0 <= c.suffix_decoding_min_token_prob <= 1, "suffix_decoding_min_token_prob", "0 to 1")
