"""jax's own compilation cache, in a folder that duetto has chosen: bounded, and with checksums in duetto's.

jax writes in place, overwrites nothing, and finds damage only if its compression does: zlib has a checksum,
zstd has none. A checksum is noted when a start ends: it finds what a disk or a power cut has changed since,
and jax compiles again. A program that a killed process has left half written has none: jax warns, and
compiles it at each start.
"""

import hashlib
import os
from contextlib import suppress
from importlib.util import find_spec
from io import BufferedReader
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from ....user_folders import cache_home, owned
from ...host.blob_store import open_file
from ...host.streams import warn
from . import executable_cache

# Bytes: jax compresses, and its copies are evicted before duetto's (see `executable_cache.compile`).
LIMIT = 1 << 29
SUMS = "sums"  # key of the checksums in the executable cache
PROGRAM, USED = "-cache", "-atime"  # suffixes of jax's files: a program, and the time of its last use


def keep_compiled(folder: str | Path | None = "auto") -> None:
    """Let jax keep compiled programs on disk, so that the second start of a model does not compile; None
    changes nothing.

    With "auto" a directory that the user gave to jax stays as it is. If others own the folder or can write to
    it, nothing is kept, and a warning is logged.
    """
    if folder is None or (folder == "auto" and jax.config.values["jax_compilation_cache_dir"]):
        return
    try:
        chosen = str(cache_home("xla") if folder == "auto" else folder)
    except RuntimeError as error:  # the user has no home
        return warn(f"compiled programs are not kept: {error}")
    local = "://" not in chosen
    if local and not executable_cache.usable(Path(chosen)):
        return
    if local:
        bound(Path(chosen))
    if jax.config.values["jax_compilation_cache_dir"] != chosen:
        compilation_cache.reset_cache()  # else jax stays with the folder that it opened first
    jax.config.update("jax_compilation_cache_dir", chosen)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if local:
        check(Path(chosen))


def bound(folder: Path) -> None:
    """Let jax evict the least recently used programs of its folder beyond LIMIT bytes, unless the user has
    set a size."""
    if not find_spec("filelock"):  # with which jax does it
        return
    if jax.config.values["jax_compilation_cache_max_size"] == -1:
        jax.config.update("jax_compilation_cache_max_size", LIMIT)
    for file in folder.glob(f"*{PROGRAM}"):  # jax fails on a program without the time of its last use
        with suppress(OSError):
            if not used(file).exists():
                used(file).write_bytes(bytes(8))


def check(folder: Path) -> None:
    """Delete programs that differ from their checksum or that others can write; all of them if the checksums
    are damaged. A program without a checksum, of a start that did not end, stays."""
    unknown = executable_cache.read_bytes(SUMS) == b""
    sums = {} if unknown else executable_cache.read(SUMS, dict[str, bytes]) or {}
    found = set(folder.glob(f"*{PROGRAM}"))
    wrong = {file for file in found if unknown or not is_safe(file, sums.get(file.name))}
    if wrong:
        what = f"{len(wrong)} of jax's programs in {folder} were damaged, or others could write them"
        warn(f"{what}: they are deleted and made anew")
    for gone in [*wrong, *map(used, wrong)]:
        with suppress(OSError):
            gone.unlink()
    names = {file.name for file in found - wrong}
    executable_cache.write(SUMS, {name: digest for name, digest in sums.items() if name in names})


def is_safe(program: Path, digest: bytes | None) -> bool:
    """Return whether a program is this user's file, and has its checksum if that is known."""
    try:
        with open_file(program) as file:
            return owned(os.fstat(file.fileno())) and (digest is None or digest == sha256(file))
    except FileNotFoundError:  # another process has evicted it
        return True
    except OSError:  # a link, or unreadable: it is not run
        return False


def seal() -> None:
    """Note the checksums of the programs that jax has written since `check`, if that was called for its
    folder."""
    place = executable_cache.folder()
    if place is None or not (place / SUMS).exists():
        return
    with suppress(OSError):  # another process may evict some of them
        since = (place / SUMS).stat().st_mtime
        sums = executable_cache.read(SUMS, dict[str, bytes]) or {}
        new = {}
        for program in place.parent.glob(f"*{PROGRAM}"):
            whole = used(program).exists()  # jax writes it after the program
            if whole and (program.name not in sums or program.stat().st_mtime >= since):
                program.chmod(0o600)  # jax leaves the mode to the umask
                with open_file(program) as file:
                    new[program.name] = sha256(file)
        if new:
            executable_cache.write(SUMS, sums | new)


def sha256(file: BufferedReader) -> bytes:
    return hashlib.file_digest(file, "sha256").digest()


def used(program: Path) -> Path:
    """Return the file of the time of a program's last use."""
    return program.with_name(program.name.removesuffix(PROGRAM) + USED)
