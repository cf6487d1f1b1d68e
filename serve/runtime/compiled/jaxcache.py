"""jax's own compilation cache, in a folder that duetto has chosen: of bounded size, and with checksums.

jax writes in place, overwrites nothing, and finds damage only if its compression does: zlib has a checksum,
zstd has none. So duetto stores checksums at the end of a start, in its own folder. They show the files that a
disk or a power cut has changed since, and jax compiles these again. A program that a killed process has left
half written has no checksum: jax warns, and compiles it at each start.
"""

import hashlib
import os
from contextlib import suppress
from importlib.util import find_spec
from io import BufferedReader
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from ....user_folders import cache_home, is_user_owned
from ...host.blob_store import open_file
from ...host.streams import warn_once
from . import executable_cache

# Bytes of jax's programs, which are compressed. They are evicted before duetto's (see
# `executable_cache.compile_and_store`).
MAX_CACHE_BYTES = 1 << 29
SUMS_KEY = "sums"  # key of the checksums in the executable cache
# Suffixes of jax's files: a program, and the time of its last use.
PROGRAM_SUFFIX, USE_TIME_SUFFIX = "-cache", "-atime"


def enable_compilation_cache(folder: str | Path | None = "auto") -> None:
    """Let jax store compiled programs in a folder, so that the second start of a model does not compile. None
    changes nothing.

    With "auto" a folder that the user gave to jax stays as it is. If other users own the folder or can write
    to it, nothing is stored, and a warning is logged.
    """
    if folder is None or (folder == "auto" and jax.config.values["jax_compilation_cache_dir"]):
        return
    try:
        cache_folder = str(cache_home("xla") if folder == "auto" else folder)
    except RuntimeError as error:  # the user has no home
        return warn_once(f"compiled programs are not kept: {error}")
    is_local = "://" not in cache_folder
    if is_local and not executable_cache.can_create_folder(Path(cache_folder)):
        return
    if is_local:
        limit_cache_size(Path(cache_folder))
    if jax.config.values["jax_compilation_cache_dir"] != cache_folder:
        compilation_cache.reset_cache()  # otherwise jax keeps using the folder that it opened first
    jax.config.update("jax_compilation_cache_dir", cache_folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if is_local:
        delete_damaged_programs(Path(cache_folder))


def limit_cache_size(folder: Path) -> None:
    """Let jax evict the least recently used programs of its folder beyond `MAX_CACHE_BYTES`, unless the user
    has set a size."""
    if not find_spec("filelock"):  # jax needs this package to evict
        return
    if jax.config.values["jax_compilation_cache_max_size"] == -1:
        jax.config.update("jax_compilation_cache_max_size", MAX_CACHE_BYTES)
    for file in folder.glob(f"*{PROGRAM_SUFFIX}"):  # jax fails on a program without the time of its last use
        with suppress(OSError):
            if not use_time_path(file).exists():
                use_time_path(file).write_bytes(bytes(8))


def delete_damaged_programs(folder: Path) -> None:
    """Delete jax's programs that differ from their checksum, or that other users can write to.

    If the checksums are damaged, all programs are deleted. A program without a checksum, of a start that did
    not end, stays.
    """
    is_damaged = executable_cache.read_entry(SUMS_KEY) == b""
    sums = {} if is_damaged else executable_cache.read_record(SUMS_KEY, dict[str, bytes]) or {}
    programs = set(folder.glob(f"*{PROGRAM_SUFFIX}"))
    damaged = {file for file in programs if is_damaged or not is_trusted_file(file, sums.get(file.name))}
    if damaged:
        message = f"{len(damaged)} of jax's programs in {folder} were damaged, or others could write them"
        warn_once(f"{message}: they are deleted and made anew")
    for path in [*damaged, *map(use_time_path, damaged)]:
        with suppress(OSError):
            path.unlink()
    names = {file.name for file in programs - damaged}
    executable_cache.write_record(SUMS_KEY, {name: digest for name, digest in sums.items() if name in names})


def is_trusted_file(path: Path, digest: bytes | None) -> bool:
    """Return True if a program is this user's file and has the given checksum; None: any checksum."""
    try:
        with open_file(path) as file:
            return is_user_owned(os.fstat(file.fileno())) and (digest is None or digest == file_sha256(file))
    except FileNotFoundError:  # another process has evicted it
        return True
    except OSError:  # a link, or unreadable
        return False


def store_checksums() -> None:
    """Store the checksums of the programs that jax has written since `delete_damaged_programs`. Do nothing if
    `delete_damaged_programs` was not called for jax's folder."""
    program_folder = executable_cache.program_folder()
    if program_folder is None or not (program_folder / SUMS_KEY).exists():
        return
    with suppress(OSError):  # another process may evict some of them
        since = (program_folder / SUMS_KEY).stat().st_mtime
        sums = executable_cache.read_record(SUMS_KEY, dict[str, bytes]) or {}
        new_sums = {}
        for program in program_folder.parent.glob(f"*{PROGRAM_SUFFIX}"):
            is_complete = use_time_path(program).exists()  # jax writes it after the program
            if is_complete and (program.name not in sums or program.stat().st_mtime >= since):
                program.chmod(0o600)  # jax leaves the mode to the umask
                with open_file(program) as file:
                    new_sums[program.name] = file_sha256(file)
        if new_sums:
            executable_cache.write_record(SUMS_KEY, sums | new_sums)


def file_sha256(file: BufferedReader) -> bytes:
    """Return the SHA-256 of a file's content."""
    return hashlib.file_digest(file, "sha256").digest()


def use_time_path(path: Path) -> Path:
    """Return the path of the file that holds the time of a program's last use."""
    return path.with_name(path.name.removesuffix(PROGRAM_SUFFIX) + USE_TIME_SUFFIX)
