"""Generation defaults of a checkpoint: the tokens that end a text, and its authors' sampling parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..refusals import quote
from .families.fields import MAX_COUNT
from .folders import read_config_json, read_json
from .tensors import CheckpointError

# Fields of generation_config.json: the parameter that each sets, and its type.
SAMPLING_FIELDS = {
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
POOLING_NAMES = {"lasttoken": "last", "mean_tokens": "mean"}  # names of Sentence Transformers: ours
VALUE_TYPES = {
    int: ((int,), "an integer"),
    float: ((int, float), "a number"),
    bool: ((bool,), "true or false"),
}


@dataclass(frozen=True)
class GenerationDefaults:
    """Generation defaults of a checkpoint.

    eos_token_ids: tokens that end a text.
    bos_token_id: token before a text, or None if not stated.
    sampling: parameters that the checkpoint's authors recommend, by the names of `SamplingParams`.
    pooling: pooling of hidden states to an embedding ("last", "mean"), or an unsupported name; None if not
    stated.
    """

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    sampling: dict[str, int | float | bool] = field(default_factory=dict)
    pooling: str | None = None


def read_generation_config(path: str | Path) -> GenerationDefaults:
    """Read the generation defaults from a folder's `generation_config.json` and `config.json`.

    End tokens of both files count. The `bos_token_id` is taken from the first file that states one. Sampling
    parameters are taken from `generation_config.json`; `do_sample` is ignored, as in vLLM. Raises
    CheckpointError for a value of the wrong type.
    """
    file, folder = Path(path) / "generation_config.json", Path(path)
    generation = read_json(file) if file.exists() else {}
    stated = {file: generation, folder / "config.json": read_config_json(folder)}
    bos, eos = (
        [i for at, raw in stated.items() for i in read_token_ids(at, raw, name)]
        for name in ("bos_token_id", "eos_token_id")
    )
    sampling = {
        SAMPLING_FIELDS[name][0]: generation[name]
        for name in SAMPLING_FIELDS
        if generation.get(name) is not None
    }
    for name, (parameter, kind) in SAMPLING_FIELDS.items():
        value, (allowed, words) = sampling.get(parameter), VALUE_TYPES[kind]
        if value is not None and type(value) not in allowed:
            raise CheckpointError(f"{file}: {name} is {quote(value)}, expected {words}")
    ends, first = tuple(dict.fromkeys(eos)), bos[0] if bos else None
    return GenerationDefaults(ends, first, sampling, read_pooling(folder))


def read_pooling(folder: Path) -> str | None:
    """Return the pooling of a Sentence Transformers folder, or None if it states none.

    A pooling that is not supported keeps the folder's name for it.
    """
    file, modules = folder / "1_Pooling" / "config.json", folder / "modules.json"
    if modules.exists() and '.Dense"' in modules.read_text():  # layers that are not supported
        return "dense"
    stated = read_json(file) if file.exists() else {}
    modes = [name.removeprefix("pooling_mode_") for name, value in stated.items() if value is True]
    mode = stated.get("pooling_mode") or "+".join(m for m in modes if m != "include_prompt") or None
    return POOLING_NAMES.get(str(mode), mode)


def read_token_ids(file: Path, raw: Mapping[str, Any], name: str) -> list[int]:
    """Return a field that is a token id or a list of them, as a list. Raises CheckpointError."""
    value = raw.get(name)
    ids = value if isinstance(value, list) else [value] if value is not None else []
    if not all(type(i) is int and 0 <= i <= MAX_COUNT for i in ids):
        raise CheckpointError(
            f"{file}: {name} is {quote(value)}, expected a token id or a list of them, "
            f"each at most {MAX_COUNT}"
        )
    return ids
