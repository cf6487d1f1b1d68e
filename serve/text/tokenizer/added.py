"""A tokenizer as its files give it, and the tokens that files beside a vocabulary add to it and name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ....checkpoints.folders import read_json

if TYPE_CHECKING:
    import tokenizers

NAMED = ("unk_token", "bos_token", "eos_token", "pad_token")


class Described(msgspec.Struct):
    """A special token with what else is known of it."""

    content: str


Token = str | Described


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as its files give it. `backend` has the tokens and decodes; it encodes too, unless `encode`
    is there, which makes ids of a text, of whether special tokens are added, and of the mark that hides
    special tokens. `config` is completed by what the files imply.
    """

    backend: "tokenizers.Tokenizer"
    config: Mapping[str, Any]
    encode: Callable[[str, bool, str], list[int]] | None = None


def named(config: Mapping[str, Any]) -> list[Any]:
    """The special tokens that a configuration names, each as a string or as an object."""
    return [config[name] for name in NAMED if config.get(name)] + list(
        config.get("additional_special_tokens") or ()
    )


def content(token: Any) -> str | None:
    """A token's text; files give it alone, or in an object with what else is known of it."""
    return token.get("content") if isinstance(token, Mapping) else token


def added_beside(
    folder: Path, config: Mapping[str, Any], known: Mapping[int, str]
) -> dict[int, "tokenizers.AddedToken"]:
    """Added tokens by id: those known from the model itself are special, those of `added_tokens.json` and of
    `added_tokens_decoder` as these and the names of special tokens say. Raises ValueError for an id that is
    no number."""
    from tokenizers import AddedToken

    special = {content(token) for token in named(config)}
    found = {i: AddedToken(token, special=True, normalized=False) for i, token in known.items()}
    try:
        file = folder / "added_tokens.json"
        for token, i in (read_json(file) if file.exists() else {}).items():
            found[int(i)] = AddedToken(token, special=token in special, normalized=False)
        for i, entry in config.get("added_tokens_decoder", {}).items():
            flags = {name: bool(entry.get(name)) for name in ("single_word", "lstrip", "rstrip", "special")}
            flags["special"] |= entry["content"] in special
            found[int(i)] = AddedToken(entry["content"], normalized=False, **flags)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{folder}: added_tokens.json or added_tokens_decoder is malformed: {error!r}"
        ) from error
    return dict(sorted(found.items()))


def add_tokens(
    backend: "tokenizers.Tokenizer", folder: Path, added: Mapping[int, "tokenizers.AddedToken"]
) -> None:
    """Add tokens under their ids. Raises ValueError where one cannot have its id."""
    backend.add_tokens(list(added.values()))
    for i, token in added.items():
        got = backend.token_to_id(token.content)
        if got != i:
            raise ValueError(f"{folder}: added token {token.content!r} has id {i}, but would become {got}")


def read_tokens(file: Path) -> dict[str, Any]:
    """The JSON object of a file that names special tokens. Raises ValueError for a token or a list of them
    that is none."""
    config = read_json(file) if file.exists() else {}
    expected = dict.fromkeys(NAMED, Token | None) | {"additional_special_tokens": list[Token] | None}
    for name, kind in expected.items():
        try:
            msgspec.convert(config.get(name), kind)
        except msgspec.ValidationError as error:
            raise ValueError(f"{file}: {name} is {config[name]!r:.80}, which is no token: {error}") from error
    return config
