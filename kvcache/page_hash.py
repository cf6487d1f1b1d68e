"""Page hashes: each covers all tokens up to the end of its page, so equal prefixes have equal hashes."""

import hashlib
import struct
from collections.abc import Sequence

import numpy as np

from ..model.embeddings.prompt import EmbeddingSpan, overlapping_spans


def root_hash(*salt: str) -> bytes:
    """Return the hash before the first page. `salt` has all that changes a page's bits besides its tokens
    (model, dtype)."""
    return hashlib.blake2b("\0".join(salt).encode(), digest_size=16).digest()


def extend_page_hashes(
    hashes: list[bytes],
    tokens: Sequence[int],
    num_pages: int,
    page_size: int,
    root: bytes,
    prompt_len: int | None = None,
    spans: Sequence[EmbeddingSpan] = (),
) -> None:
    """Append the hashes of the first `num_pages` pages of `tokens` that `hashes` lacks; those pages must be
    full.

    Each hash covers its page and the hash before it, as in vLLM's prefix cache. `root` is the hash before the
    first page. `prompt_len` is the number of prompt tokens: pages with later tokens get other hashes. Set it
    where decode writes other bits than prefill. A page that overlaps one of `spans` is named by the span's
    content too, and by where in the content it begins.
    """
    assert num_pages * page_size <= len(tokens), f"{num_pages} pages of {page_size} from {len(tokens)} tokens"
    first, size = len(hashes), 4 * page_size
    token_bytes = np.asarray(tokens[first * page_size : num_pages * page_size], np.int32).tobytes()
    parent_hash = hashes[-1] if hashes else root
    for i in range(first, num_pages):
        page_bytes = token_bytes[(i - first) * size : (i - first + 1) * size]
        decode_tag = (
            b""
            if prompt_len is None or (i + 1) * page_size <= prompt_len
            else b"decoded behind %d" % prompt_len
        )
        content_tag = b"".join(
            content_bytes(span, i * page_size)
            for span in overlapping_spans(spans, i * page_size, (i + 1) * page_size)
        )
        parent_hash = hashlib.blake2b(
            parent_hash + page_bytes + decode_tag + content_tag, digest_size=16
        ).digest()
        hashes.append(parent_hash)


def content_bytes(span: EmbeddingSpan, page_start: int) -> bytes:
    """Return the bytes that a span adds to the hash of a page it overlaps: its digest, and the page's offset
    in it."""
    return struct.pack("<iiI", page_start - span.start, span.count, len(span.digest)) + span.digest
