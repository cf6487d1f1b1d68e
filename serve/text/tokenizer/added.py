"""A tokenizer as its files define it, and tokens that further files add to it and name."""

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
    """A special token with its attributes."""

    content: str


Token = str | Described


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as its files define it.

    backend: has the tokens, and decodes
    config: completed by what the files imply
    encode: makes ids of a text, given whether special tokens are added and the mark that hides them; None:
        the backend encodes
    """

    backend: "tokenizers.Tokenizer"
    config: Mapping[str, Any]
    encode: Callable[[str, bool, str], list[int]] | None = None


def named(config: Mapping[str, Any]) -> list[Any]:
    """Return the special tokens that a configuration names, each a string or an object."""
    return [config[name] for name in NAMED if config.get(name)] + list(
        config.get("additional_special_tokens") or ()
    )


def content(token: Any) -> str | None:
    """Return a token's text; files give it alone, or in an object with its attributes."""
    return token.get("content") if isinstance(token, Mapping) else token


def added_beside(
    folder: Path, config: Mapping[str, Any], known: Mapping[int, str]
) -> dict[int, "tokenizers.AddedToken"]:
    """Return added tokens by id. Tokens that the model itself has are special; those of `added_tokens.json`
    and `added_tokens_decoder` are as these files and the names of special tokens say. Raises ValueError for
    an id that is no number."""
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
    """Add tokens under their ids. Raises ValueError if one cannot have its id."""
    backend.add_tokens(list(added.values()))
    for i, token in added.items():
        got = backend.token_to_id(token.content)
        if got != i:
            raise ValueError(f"{folder}: added token {token.content!r} has id {i}, but would become {got}")


def read_tokens(file: Path) -> dict[str, Any]:
    """Read a file that names special tokens. Raises ValueError for an invalid token or list."""
    config = read_json(file) if file.exists() else {}
    expected = dict.fromkeys(NAMED, Token | None) | {"additional_special_tokens": list[Token] | None}
    for name, kind in expected.items():
        try:
            msgspec.convert(config.get(name), kind)
        except msgspec.ValidationError as error:
            raise ValueError(f"{file}: {name} is {config[name]!r:.80}, which is no token: {error}") from error
    return config
