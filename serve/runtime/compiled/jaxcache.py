"""jax's own cache of compiled programs, in a folder that duetto has chosen: of bounded size, and with
checksums beside it.

jax finds damage in a program only where its compression does, leaves it there, and deletes nothing unless it
is told a size.
"""

import hashlib
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from ...host import store
from . import kept

# Bytes: jax compresses, and its copies are to go before those in `store` (see `kept.compile`).
LIMIT = 1 << 29
SUMS = "sums"  # what the checksums are kept under
PROGRAM, USED = "-cache", "-atime"  # how names end of jax's files: a program, and the time of its last use


def keep_compiled(folder: str | Path | None = "auto") -> None:
    """Let jax keep compiled programs on disk, so that the second start of a model does not compile; None
    changes nothing.

    With "auto" a directory that the user gave to jax stays as it is. In one that others own or can write to,
    nothing is kept, and a warning says so.
    """
    if folder is None or (folder == "auto" and jax.config.values["jax_compilation_cache_dir"]):
        return
    try:
        chosen = str(store.cache_home("xla") if folder == "auto" else folder)
    except RuntimeError as error:  # the user has no home
        return store.warn(f"compiled programs are not kept: {error}")
    local = "://" not in chosen
    if local and not store.usable(Path(chosen)):
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
    """Let jax delete what it used least recently in a folder of its cache; a size that the user has set
    stays."""
    if not find_spec("filelock"):  # with which jax does it
        return
    if jax.config.values["jax_compilation_cache_max_size"] == -1:
        jax.config.update("jax_compilation_cache_max_size", LIMIT)
    for file in folder.glob(f"*{PROGRAM}"):  # jax stumbles over a program that lacks the time of its last use
        with suppress(OSError):
            if not used(file).exists():
                used(file).write_bytes(bytes(8))


def check(folder: Path) -> None:
    """Delete the programs that are not what they were when an earlier start ended, or that others can write.

    All of them go where the checksums themselves are damaged. One without a checksum, of a start that did not
    end, stays.
    """
    unknown = kept.read_bytes(SUMS) == b""
    sums = {} if unknown else kept.read(SUMS, dict[str, bytes]) or {}
    found = list(folder.glob(f"*{PROGRAM}"))
    wrong = [file for file in found if unknown or not is_safe(file, sums.get(file.name))]
    if wrong:
        what = f"{len(wrong)} of jax's programs in {folder} were damaged, or others could write them"
        store.warn(f"{what}: they are deleted and made anew")
    for file in wrong:
        for gone in (file, used(file)):
            with suppress(OSError):
                gone.unlink()
    names = {file.name for file in found} - {file.name for file in wrong}
    kept.write(SUMS, {name: digest for name, digest in sums.items() if name in names})


def is_safe(program: Path, digest: bytes | None) -> bool:
    """Whether a program is this user's file, and has its checksum if that is known."""
    try:
        own = program.is_file() and not program.is_symlink() and store.owned(program.stat())
    except FileNotFoundError:  # another process was faster
        return True
    except OSError:  # what cannot be looked at is not run
        return False
    return own and digest in (None, checksum(program))


def seal() -> None:
    """Note the checksums of the programs that jax has written since `check`, where that was called for its
    folder."""
    place = kept.folder()
    if place is None or not (place / SUMS).exists():
        return
    with suppress(OSError):  # another process may delete some of them
        since = (place / SUMS).stat().st_mtime
        sums = kept.read(SUMS, dict[str, bytes]) or {}
        new = {}
        for file in place.parent.glob(f"*{PROGRAM}"):
            written = used(file).exists()  # to its end
            if written and (file.name not in sums or file.stat().st_mtime >= since):
                file.chmod(0o600)  # jax leaves that to the umask
                new[file.name] = checksum(file)
        if new:
            kept.write(SUMS, sums | new)


def used(program: Path) -> Path:
    return program.with_name(program.name.removesuffix(PROGRAM) + USED)


def checksum(file: Path) -> bytes:
    """Empty where it cannot be read."""
    with suppress(OSError), open(file, "rb") as f:
        return hashlib.file_digest(f, "sha256").digest()
    return b""
