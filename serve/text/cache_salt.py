"""The cache salt of requests: only those with equal salts share cached pages. Nothing here imports jax."""

import hashlib
from collections.abc import Mapping
from typing import Any

from ...refusals import ensure, quote

MAX_SALT_CHARACTERS = 1024
SALT_FORM = f"a string of 1 to {MAX_SALT_CHARACTERS} characters"


def is_cache_salt(value: Any) -> bool:
    """Return whether a field of a request can be its salt; None is no salt."""
    return value is None or (isinstance(value, str) and 0 < len(value) <= MAX_SALT_CHARACTERS)


def hash_salt(salt: str | None) -> bytes:
    """Return the 16 bytes that page hashes with a salt begin from; none without a salt."""
    if salt is None:
        return b""
    return hashlib.blake2b(encode_salt(salt), digest_size=16, person=b"cache salt").digest()


def client_salt(isolation: str, client: str, salt: Any) -> Any:
    """Return the salt of a client's request. With an isolation by key it is a hash of the `salt` that it
    gives and of `client`, the hash of its key, in 32 hexadecimal digits. A wrong salt stays as it is."""
    if isolation == "none" or not is_cache_salt(salt):
        return salt
    text, key = encode_salt(salt or ""), bytes.fromhex(client)
    return hashlib.blake2b(text, digest_size=16, key=key, person=b"cache key").hexdigest()


def encode_salt(salt: str) -> bytes:
    return salt.encode(errors="surrogatepass")


def prompt_with_salt(ids: list[int], salt: str | None) -> list[int] | dict[str, Any]:
    """Return token ids as a prompt with a salt."""
    return ids if salt is None else {"prompt_token_ids": ids, "cache_salt": salt}


def read_prompt_salt(prompt: Any) -> str | None:
    """Return the salt of a prompt that is a mapping, None of others. Raises ValueError for a wrong one."""
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    ensure(is_cache_salt(salt), f"cache_salt={quote(salt)} is not allowed: {SALT_FORM}")
    return salt
