"""Names of pages: a page is called after all tokens up to its end, so equal prefixes have equal names."""

import hashlib
from collections.abc import Sequence

import numpy as np


def root(*salt: str) -> bytes:
    """The name before the first page: whatever changes a page's bits besides its tokens (model, dtype, page size)."""
    return hashlib.blake2b("\0".join(salt).encode(), digest_size=16).digest()


def extend(names: list[bytes], tokens: Sequence[int], page_size: int, start: bytes) -> None:
    """Append the names of the full pages of `tokens` that `names` lacks (a chain of hashes, as in vLLM's prefix cache)."""
    for i in range(len(names), len(tokens) // page_size):
        page = np.asarray(tokens[i * page_size : (i + 1) * page_size], np.int32).tobytes()
        parent = names[i - 1] if i else start
        names.append(hashlib.blake2b(parent + page, digest_size=16).digest())
