"""What tests compare: folders of tensors and trees of parameters bit for bit, and log-probabilities."""

from pathlib import Path

import numpy as np
from safetensors import safe_open

from duetto.model.tree import leaves_by_path


def same_tensors(a: Path, b: Path, ignored: str = "no such name") -> bool:
    """Whether two folders hold the same tensors, bit for bit, in one file or in several."""
    held = [{n: f for f in folder.glob("*.safetensors") for n in names(f)} for folder in (a, b)]
    assert {n for n in held[0] if ignored not in n} == set(held[1])
    return all(bits(held[0][name], name) == bits(held[1][name], name) for name in held[1])


def names(file: Path) -> list[str]:
    with safe_open(file, "np") as f:
        return list(f.keys())


def bits(file: Path, name: str):
    with safe_open(file, "np") as f:
        array = f.get_tensor(name)
    return array.dtype, array.shape, array.tobytes()


def log_softmax(logits: list[float]) -> np.ndarray:
    x = np.array(logits, np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def same_params(a, b) -> bool:
    """Whether two trees hold the same arrays under the same names, in the same dtypes."""
    a, b = leaves_by_path(a), leaves_by_path(b)
    return a.keys() == b.keys() and all(
        x.dtype == b[path].dtype and np.array_equal(np.asarray(x), np.asarray(b[path]))
        for path, x in a.items()
    )
