"""A tokenizer as its files define it, and tokens that further files add to it and name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ....checkpoints.folders import read_json

if TYPE_CHECKING:
    import tokenizers

# in the order in which Transformers adds them
TOKEN_FIELDS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenObject(msgspec.Struct):
    """A special token with its attributes."""

    content: str


TokenEntry = str | TokenObject


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as its files define it.

    backend: tokenizer that has the tokens, and decodes
    config: `tokenizer_config.json`, with the defaults that other files imply
    encode: function from a text, whether to add special tokens, and the mark that hides special tokens, to
        token ids; None: the backend encodes
    """

    backend: "tokenizers.Tokenizer"
    config: Mapping[str, Any]
    encode: Callable[[str, bool, str], list[int]] | None = None


def list_special_tokens(config: Mapping[str, Any]) -> list[Any]:
    """Return all special tokens that a configuration names, each a string or an object.

    Some have a field of their own (`list_field_tokens`). `extra_special_tokens` or
    `additional_special_tokens` lists the others.
    """
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    return [*list_field_tokens(config), *(extra.values() if isinstance(extra, Mapping) else extra)]


def list_field_tokens(config: Mapping[str, Any]) -> list[Any]:
    """Return the special tokens that have a field of their own: one of Transformers, or of the model, such as
    `image_token`."""
    others = (name for name in config if name.endswith("_token") and name not in TOKEN_FIELDS)
    tokens = (config.get(name) for name in (*TOKEN_FIELDS, *others))
    return [token for token in tokens if token and isinstance(token, str | Mapping) and token_content(token)]


def token_content(token: Any) -> str | None:
    """Return a token's text; files give it alone, or in an object with its attributes."""
    return token.get("content") if isinstance(token, Mapping) else token


def read_added_tokens(
    folder: Path, config: Mapping[str, Any], known: Mapping[int, str]
) -> dict[int, "tokenizers.AddedToken"]:
    """Return added tokens by id: the `known` tokens of the model, and the tokens of its folder.

    The `known` tokens are special. A token of `added_tokens.json` or `added_tokens_decoder` is special if its
    entry says so, or if the configuration names it. Raises ValueError for an id that is no number.
    """
    special = {token_content(token) for token in list_special_tokens(config)}
    stated = read_added_tokens_file(folder) | read_added_tokens_decoder(folder, config)
    added_tokens = {
        i: make_added_token({"content": token, "normalized": False}, True) for i, token in known.items()
    }
    for i, entry in stated.items():
        added_tokens[i] = make_added_token({**entry, "normalized": False}, entry["content"] in special)
    return dict(sorted(added_tokens.items()))


def add_missing_tokens(backend: "tokenizers.Tokenizer", folder: Path, config: Mapping[str, Any]) -> None:
    """Add the tokens that `tokenizer.json` lacks, as Transformers does.

    First come the tokens of `added_tokens_decoder`, or else of `added_tokens.json`, by id. Then come the
    tokens that the configuration names. Their flags replace the flags in `tokenizer.json`. Raises ValueError
    for an id that is no number.
    """
    has_decoder = "added_tokens_decoder" in config
    stated = read_added_tokens_decoder(folder, config) if has_decoder else read_added_tokens_file(folder)
    special = {token_content(token) for token in list_field_tokens(config)}
    tokens = [make_added_token(entry, entry["content"] in special) for _, entry in sorted(stated.items())]
    known = {token.content for token in (*backend.get_added_tokens_decoder().values(), *tokens)}
    missing: dict[Any, Any] = {}
    for token in list_special_tokens(config):
        missing.setdefault(token_content(token), token)
    backend.add_tokens(
        tokens + [make_added_token(token, True) for name, token in missing.items() if name not in known]
    )


def read_added_tokens_file(folder: Path) -> dict[int, dict[str, Any]]:
    """Return what `added_tokens.json` states, by id."""
    file = folder / "added_tokens.json"
    stated = read_json(file) if file.exists() else {}
    return index_added_entries(folder, {i: {"content": token} for token, i in stated.items()})


def read_added_tokens_decoder(folder: Path, config: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return what `added_tokens_decoder` states, by id."""
    return index_added_entries(folder, config.get("added_tokens_decoder") or {})


def index_added_entries(folder: Path, stated: Any) -> dict[int, dict[str, Any]]:
    """Return entries of added tokens by id. Raises ValueError for a malformed one."""
    try:
        return {int(i): {**entry, "content": "".join(entry["content"])} for i, entry in stated.items()}
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{folder}: added_tokens.json or added_tokens_decoder is malformed: {error!r}"
        ) from error


def make_added_token(token: Any, is_special: bool) -> "tokenizers.AddedToken":
    """Return a token with the flags that its object states; a string has none."""
    from tokenizers import AddedToken

    stated = token if isinstance(token, Mapping) else {"content": token}
    names = ("single_word", "lstrip", "rstrip", "normalized")
    flags = {name: bool(stated[name]) for name in names if stated.get(name) is not None}
    return AddedToken(stated["content"], special=is_special or bool(stated.get("special")), **flags)


def add_tokens_at_ids(
    backend: "tokenizers.Tokenizer", folder: Path, added: Mapping[int, "tokenizers.AddedToken"]
) -> None:
    """Add tokens under their ids. Raises ValueError if one cannot have its id."""
    backend.add_tokens(list(added.values()))
    for i, token in added.items():
        token_id = backend.token_to_id(token.content)
        if token_id != i:
            raise ValueError(
                f"{folder}: added token {token.content!r} has id {i}, but would become {token_id}"
            )


def read_token_config(file: Path) -> dict[str, Any]:
    """Read a file that names special tokens. Raises ValueError for an invalid token or list."""
    config = read_json(file) if file.exists() else {}
    expected = dict.fromkeys(TOKEN_FIELDS, TokenEntry | None) | {
        "additional_special_tokens": list[TokenEntry] | None,
        "extra_special_tokens": list[TokenEntry] | dict[str, TokenEntry] | None,
    }
    for name, kind in expected.items():
        try:
            msgspec.convert(config.get(name), kind)
        except msgspec.ValidationError as error:
            raise ValueError(f"{file}: {name} is {config[name]!r:.80}, which is no token: {error}") from error
    return config
