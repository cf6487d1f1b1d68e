"""Names of pages: a page is called after all tokens up to its end, so equal prefixes have equal names."""

import hashlib
from collections.abc import Sequence

import numpy as np


def root(*salt: str) -> bytes:
    """The name before the first page: whatever changes a page's bits besides its tokens (model, dtype)."""
    return hashlib.blake2b("\0".join(salt).encode(), digest_size=16).digest()


def extend(
    names: list[bytes],
    tokens: Sequence[int],
    pages: int,
    page_size: int,
    start: bytes,
    prompt: int | None = None,
) -> None:
    """Append the names that `names` lacks of the first `pages` pages of `tokens` (a chain of hashes, as in
    vLLM's prefix cache); those pages are full.

    Where decode writes other bits than prefill, pages with tokens behind the first `prompt` have names of
    their own.
    """
    assert pages * page_size <= len(tokens), f"{pages} pages of {page_size} from {len(tokens)} tokens"
    for i in range(len(names), pages):
        page = np.asarray(tokens[i * page_size : (i + 1) * page_size], np.int32).tobytes()
        parent = names[i - 1] if i else start
        decoded = b"" if prompt is None or (i + 1) * page_size <= prompt else b"decoded behind %d" % prompt
        names.append(hashlib.blake2b(parent + page + decoded, digest_size=16).digest())
