"""The file of a head that guesses for a decoder: `heads.safetensors`, three tensors, whose shapes are all its
sizes."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..model.heads import Head, head_spec
from ..model.tree import paths
from .tensors import CheckpointError

FILE = "heads.safetensors"


def save_head(folder: str | Path, head: Head, dtype: Any = np.float16) -> None:
    """Write a head into a folder, by default in half precision."""
    from safetensors.numpy import save

    Path(folder).mkdir(parents=True, exist_ok=True)
    arrays = {path: np.ascontiguousarray(np.asarray(x).astype(dtype)) for path, x in paths(head).items()}
    (Path(folder) / FILE).write_bytes(save(arrays))


def load_head(folder: str | Path, D: int, dtype: Any) -> Head:
    """The head in a folder, for a decoder whose hidden states have size D, cast to the decoder's dtype.

    Raises CheckpointError where the file is missing, cut off, or another model's.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    file = Path(folder) / FILE
    try:
        found = load_file(file)
    except FileNotFoundError as e:
        raise CheckpointError(f"{file}: no such file, expected the folder of trained heads") from e
    except SafetensorError as e:
        raise CheckpointError(f"{file}: cut off, or not a safetensors file ({e})") from e
    F = found["out"].shape[0] if found.get("out", np.zeros(0)).ndim == 2 else 0
    wanted = paths(head_spec(D, F))
    if found.keys() != wanted.keys():
        raise CheckpointError(f"{file}: has the tensors {sorted(found)}, expected {sorted(wanted)}")
    for name, spec in wanted.items():
        if found[name].shape != spec.shape:
            raise CheckpointError(
                f"{file}: {name} has shape {list(found[name].shape)}, expected {list(spec.shape)}"
            )
        if not np.isfinite(found[name]).all():
            raise CheckpointError(f"{file}: {name} holds a number that is not finite")
    return Head(**{name: jnp.asarray(x, dtype) for name, x in found.items()})
