"""Generation defaults of a checkpoint: the tokens that end a text, and its authors' sampling parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..refusals import shown
from .families.fields import MAX_COUNT
from .folders import read_config_json, read_json
from .tensors import CheckpointError

# Fields of generation_config.json, and the parameters that they set.
FIELDS = {
    "temperature": ("temperature", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "repetition_penalty": ("repetition_penalty", float),
    "presence_penalty": ("presence_penalty", float),
    "frequency_penalty": ("frequency_penalty", float),
    "max_new_tokens": ("max_tokens", int),
    "skip_special_tokens": ("skip_special_tokens", bool),
}
POOLING = {"lasttoken": "last", "mean_tokens": "mean"}  # of Sentence Transformers
TYPES = {int: ((int,), "an integer"), float: ((int, float), "a number"), bool: ((bool,), "true or false")}


@dataclass(frozen=True)
class GenerationDefaults:
    """Generation defaults of a checkpoint. `sampling`: parameters that its authors recommend, by our
    names."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    sampling: dict[str, int | float | bool] = field(default_factory=dict)
    pooling: str | None = None  # of hidden states to an embedding


def generation_defaults(path: str | Path) -> GenerationDefaults:
    """From `generation_config.json` and `config.json`: end tokens of both, the others of the first that
    states them.

    `sampling` holds the parameters that `generation_config.json` states; `do_sample` is ignored, as in vLLM.
    Raises CheckpointError for a value of the wrong type.
    """
    file, folder = Path(path) / "generation_config.json", Path(path)
    own = read_json(file) if file.exists() else {}
    stated = {file: own, folder / "config.json": read_config_json(folder)}
    bos, eos = (
        [i for at, raw in stated.items() for i in token_ids(at, raw, name)]
        for name in ("bos_token_id", "eos_token_id")
    )
    sampling = {FIELDS[name][0]: own[name] for name in FIELDS if own.get(name) is not None}
    for name, (parameter, kind) in FIELDS.items():
        value, (allowed, words) = sampling.get(parameter), TYPES[kind]
        if value is not None and type(value) not in allowed:
            raise CheckpointError(f"{file}: {name} is {shown(value)}, expected {words}")
    ends, first = tuple(dict.fromkeys(eos)), bos[0] if bos else None
    return GenerationDefaults(ends, first, sampling, pooling_in(folder))


def pooling_in(folder: Path) -> str | None:
    """Pooling of a folder of Sentence Transformers; one that is not supported keeps its name there. None if
    the folder says nothing."""
    file, modules = folder / "1_Pooling" / "config.json", folder / "modules.json"
    if modules.exists() and '.Dense"' in modules.read_text():  # a layer that is not read
        return "dense"
    stated = read_json(file) if file.exists() else {}
    modes = [name.removeprefix("pooling_mode_") for name, value in stated.items() if value is True]
    mode = stated.get("pooling_mode") or "+".join(m for m in modes if m != "include_prompt") or None
    return POOLING.get(str(mode), mode)


def token_ids(file: Path, raw: Mapping[str, Any], name: str) -> list[int]:
    value = raw.get(name)
    ids = value if isinstance(value, list) else [value] if value is not None else []
    if not all(type(i) is int and 0 <= i <= MAX_COUNT for i in ids):
        raise CheckpointError(
            f"{file}: {name} is {shown(value)}, expected a token id or a list of them, "
            f"each at most {MAX_COUNT}"
        )
    return ids
