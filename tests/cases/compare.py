"""What tests compare: folders of tensors bit for bit, and log-probabilities."""

from pathlib import Path

import numpy as np
from safetensors import safe_open


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
