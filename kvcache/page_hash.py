"""Page hashes: a page's name is the hash of all tokens up to its end, so equal prefixes have equal names."""

import hashlib
from collections.abc import Sequence

import numpy as np


def root(*salt: str) -> bytes:
    """The hash before the first page: of all that changes a page's bits besides its tokens (model, dtype)."""
    return hashlib.blake2b("\0".join(salt).encode(), digest_size=16).digest()


def extend(
    names: list[bytes],
    tokens: Sequence[int],
    pages: int,
    page_size: int,
    start: bytes,
    prompt: int | None = None,
) -> None:
    """Append the hashes that `names` lacks of the first `pages` pages of `tokens`; those pages are full. Each
    hash covers its page and the hash before it, as in vLLM's prefix cache.

    Where decode writes other bits than prefill, pages with tokens after the first `prompt` have other hashes.
    """
    assert pages * page_size <= len(tokens), f"{pages} pages of {page_size} from {len(tokens)} tokens"
    first, size = len(names), 4 * page_size
    lacking = np.asarray(tokens[first * page_size : pages * page_size], np.int32).tobytes()
    parent = names[-1] if names else start
    for i in range(first, pages):
        page = lacking[(i - first) * size : (i - first + 1) * size]
        decoded = b"" if prompt is None or (i + 1) * page_size <= prompt else b"decoded behind %d" % prompt
        parent = hashlib.blake2b(parent + page + decoded, digest_size=16).digest()
        names.append(parent)
