"""Files of speculative decoding heads: `heads.safetensors`, three tensors whose shapes state all sizes."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..model.draft_head import DraftHead, draft_head_spec
from ..model.tree import leaves_by_path
from .tensors import CheckpointError

HEADS_FILE = "heads.safetensors"


def save_head(folder: str | Path, head: DraftHead, dtype: Any = np.float16) -> None:
    """Write a head into a folder, by default in half precision."""
    from safetensors.numpy import save

    Path(folder).mkdir(parents=True, exist_ok=True)
    arrays = {
        path: np.ascontiguousarray(np.asarray(x).astype(dtype)) for path, x in leaves_by_path(head).items()
    }
    (Path(folder) / HEADS_FILE).write_bytes(save(arrays))


def load_head(folder: str | Path, D: int, dtype: Any) -> DraftHead:
    """Read the head in a folder, cast to `dtype`; D is the hidden size of the decoder that it drafts for.

    Raises CheckpointError if the file is missing, cut off, or of a model with other sizes.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    file = Path(folder) / HEADS_FILE
    try:
        arrays = load_file(file)
    except FileNotFoundError as e:
        raise CheckpointError(f"{file}: no such file, expected the folder of trained heads") from e
    except SafetensorError as e:
        raise CheckpointError(f"{file}: cut off, or not a safetensors file ({e})") from e
    F = arrays["out"].shape[0] if arrays.get("out", np.zeros(0)).ndim == 2 else 0
    specs = leaves_by_path(draft_head_spec(D, F))
    if arrays.keys() != specs.keys():
        raise CheckpointError(f"{file}: has the tensors {sorted(arrays)}, expected {sorted(specs)}")
    for name, spec in specs.items():
        if arrays[name].shape != spec.shape:
            raise CheckpointError(
                f"{file}: {name} has shape {list(arrays[name].shape)}, expected {list(spec.shape)}"
            )
        if not np.isfinite(arrays[name]).all():
            raise CheckpointError(f"{file}: {name} holds a number that is not finite")
    return DraftHead(**{name: jnp.asarray(x, dtype) for name, x in arrays.items()})
