"""Kept programs: only what this user has written, and whole, is ever deserialised; the folder does not grow
for ever."""

import os
import pickle
import stat
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from suite import quick

from duetto.serve.host.blob_store import BlobStore, DamagedBlobError
from duetto.serve.host.streams import warn_once
from duetto.serve.runtime.compiled import executable_cache, jaxcache
from duetto.user_folders import is_user_owned

NAMES = "jax_compilation_cache_dir", "jax_compilation_cache_max_size"
KEY = "a" * 64
DEVICE = jax.devices()[0]


@pytest.fixture
def folder(tmp_path: Path):
    """A cache that nobody has used; jax's settings come back afterwards."""
    before = {name: jax.config.values[name] for name in NAMES}
    yield tmp_path / "cache"
    compilation_cache.reset_cache()
    for name, value in before.items():
        jax.config.update(name, value)


def program(offset: int = 1) -> jax.stages.Lowered:
    return jax.jit(lambda x: x * 2 + jnp.float32(offset)).lower(jax.ShapeDtypeStruct((3,), jnp.float32))


def runs(compiled, offset: int = 1) -> bool:
    return compiled is not None and compiled(jnp.ones(3)).tolist() == [2.0 + offset] * 3


def fails(*args, **kwargs):
    raise AssertionError("this was deserialised")


def flipped(content: bytes, bit: int) -> bytes:
    return content[: bit // 8] + bytes([content[bit // 8] ^ 1 << bit % 8]) + content[bit // 8 + 1 :]


def store_in(folder: Path) -> BlobStore:
    return BlobStore(
        folder,
        executable_cache.PROGRAM_FORMAT,
        executable_cache.MAX_FOLDER_BYTES,
        executable_cache.EVICTION_GRACE_SECONDS,
    )


def read_in(folder: Path, name: str) -> bytes | None:
    return store_in(folder).read(name)


def write_in(folder: Path, name: str, content: bytes) -> None:
    blobs = store_in(folder)
    blobs.refresh_index()
    blobs.write(name, content)


def said(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "duetto"]


# ------------------------------------------------------------ damage


def test_flipped_bits_are_found_before_anything_is_deserialised(folder, monkeypatch, caplog):
    jaxcache.enable_compilation_cache(folder)
    executable_cache.compile_and_store(KEY, program())
    file = folder / "duetto" / KEY
    whole = file.read_bytes()
    assert runs(executable_cache.load_program(KEY, DEVICE))
    for bit in (0, 8 * 20, 8 * 50, 4 * len(whole), 8 * len(whole) - 1):
        file.write_bytes(flipped(whole, bit))
        warn_once.cache_clear()
        caplog.clear()
        with monkeypatch.context() as patched:
            patched.setattr(pickle, "loads", fails)
            patched.setattr(serialize_executable, "deserialize_and_load", fails)
            assert executable_cache.load_program(KEY, DEVICE) is None
            assert executable_cache.load_program(KEY, DEVICE) is None  # of which nothing more is said
        (line,) = said(caplog)
        assert str(file) in line and "damaged" in line
        assert file.read_bytes() != flipped(whole, bit)


def test_damaged_programs_are_recompiled_and_stored_despite_jaxs_cache(folder, monkeypatch):
    """On a CPU what comes from jax's cache cannot be kept again: each start from then on would compile and
    probe."""
    monkeypatch.setattr(executable_cache, "compile_part", quick.COMPILED_FROM)
    jaxcache.enable_compilation_cache(folder)
    executable_cache.compile_and_store(KEY, program(5))
    file = folder / "duetto" / KEY
    file.write_bytes(file.read_bytes()[:-100])
    assert executable_cache.load_program(KEY, DEVICE) is None
    jax.clear_caches()
    assert runs(executable_cache.compile_and_store(KEY, program(5)), 5)
    assert runs(executable_cache.load_program(KEY, DEVICE), 5)


def test_a_file_under_another_name_is_damaged(folder):
    folder.mkdir(mode=0o700)
    write_in(folder, "a", b"content")
    (folder / "a").rename(folder / "b")
    with pytest.raises(DamagedBlobError):
        read_in(folder, "b")
    assert not (folder / "b").exists()


def test_records_of_ours_are_read_without_pickle(folder, monkeypatch):
    jaxcache.enable_compilation_cache(folder)
    monkeypatch.setattr(pickle, "loads", fails)
    executable_cache.write_record(KEY, {"a": (1, 2)})
    assert executable_cache.read_record(KEY, dict[str, tuple[int, int]]) == {"a": (1, 2)}
    assert executable_cache.read_record(KEY, list[int]) is None


def test_damaged_entries_of_jaxs_cache_are_deleted_unread(folder, caplog):
    jaxcache.enable_compilation_cache(folder)
    program(11).compile()
    jaxcache.store_checksums()
    (file,) = folder.glob("*-cache")
    whole = file.read_bytes()
    file.write_bytes(flipped(whole, 4 * len(whole)))
    for _ in range(2):
        jaxcache.enable_compilation_cache(folder)
    (line,) = said(caplog)
    assert f"1 of jax's programs in {folder} were damaged" in line and not file.exists()
    jax.clear_caches()
    assert runs(program(11).compile(), 11)  # jax would warn, and warnings are errors here
    jaxcache.store_checksums()
    jaxcache.enable_compilation_cache(folder)
    assert file.exists() and len(said(caplog)) == 1


def test_entries_of_jaxs_cache_writable_by_others_are_deleted(folder, caplog):
    before = os.umask(0o002)
    try:
        jaxcache.enable_compilation_cache(folder)
        program(23).compile()
        jaxcache.store_checksums()
    finally:
        os.umask(before)
    (file,) = folder.glob("*-cache")
    jaxcache.enable_compilation_cache(folder)
    assert file.exists() and not said(caplog)  # that the umask lets a group write is mended
    (folder / "planted-cache").write_bytes(b"0")
    (folder / "planted-cache").chmod(0o666)
    (folder / "linked-cache").symlink_to(file)
    jaxcache.enable_compilation_cache(folder)
    assert list(folder.glob("*-cache")) == [file] and "2 of jax's programs" in said(caplog)[0]


def test_without_its_checksums_nothing_of_jax_s_cache_is_trusted(folder, caplog):
    jaxcache.enable_compilation_cache(folder)
    program(19).compile()
    jaxcache.store_checksums()
    (file,) = folder.glob("*-cache")
    sums = folder / "duetto" / jaxcache.SUMS_KEY
    sums.write_bytes(flipped(sums.read_bytes(), 500))
    jaxcache.enable_compilation_cache(folder)
    assert not file.exists() and [str(sums) in said(caplog)[0], str(folder) in said(caplog)[1]] == [
        True,
        True,
    ]
    jaxcache.enable_compilation_cache(folder)
    assert len(said(caplog)) == 2


def test_a_program_that_jax_has_written_again_is_not_damaged(folder, caplog):
    jaxcache.enable_compilation_cache(folder)
    program(13).compile()
    jaxcache.store_checksums()
    (file,) = folder.glob("*-cache")
    file.write_bytes(b"evicted, and compiled once more")
    jaxcache.store_checksums()
    jaxcache.enable_compilation_cache(folder)
    assert file.exists() and not said(caplog)


def test_nothing_is_noted_of_a_folder_that_is_the_users(folder):
    folder.mkdir(mode=0o700)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    program(17).compile()
    jaxcache.store_checksums()
    assert not (folder / "duetto" / jaxcache.SUMS_KEY).exists()


# ------------------------------------------------------------ rights


def test_folders_are_made_for_one_user_whatever_the_umask_says(folder):
    before = os.umask(0)
    try:
        jaxcache.enable_compilation_cache(folder / "above" / "xla")
        executable_cache.write_record(KEY, 1)
    finally:
        os.umask(before)
    made = [folder, folder / "above", folder / "above" / "xla", folder / "above" / "xla" / "duetto"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700] * 4
    assert stat.S_IMODE((made[-1] / KEY).stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_can_write_is_not_used(folder, mode, monkeypatch, caplog):
    jaxcache.enable_compilation_cache(folder)
    executable_cache.compile_and_store(KEY, program())
    (folder / "duetto").chmod(mode)
    monkeypatch.setattr(pickle, "loads", fails)
    assert executable_cache.load_program(KEY, DEVICE) is None
    executable_cache.write_record("b", 1)
    assert not (folder / "duetto" / "b").exists() and (folder / "duetto" / KEY).exists()
    (line,) = said(caplog)
    assert f"not kept in {folder / 'duetto'}" in line and "chmod go-w" in line


def test_jax_gets_no_folder_that_others_can_write(folder, caplog):
    before = jax.config.values["jax_compilation_cache_dir"]
    folder.mkdir()
    folder.chmod(0o777)
    jaxcache.enable_compilation_cache(folder)
    assert jax.config.values["jax_compilation_cache_dir"] == before
    assert str(folder) in said(caplog)[0]


def test_links_and_files_writable_by_others_are_not_read(folder, monkeypatch):
    jaxcache.enable_compilation_cache(folder)
    executable_cache.compile_and_store(KEY, program())
    file = folder / "duetto" / KEY
    monkeypatch.setattr(pickle, "loads", fails)
    file.chmod(0o620)
    assert executable_cache.load_program(KEY, DEVICE) is None and file.exists()
    file.chmod(0o600)
    file.rename(folder / "elsewhere")
    file.symlink_to(folder / "elsewhere")
    assert executable_cache.load_program(KEY, DEVICE) is None and file.is_symlink()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="a system without users")
def test_owners_are_the_user_and_root(monkeypatch):
    def found(uid: int, mode: int = 0o40700) -> bool:
        return is_user_owned(os.stat_result((mode, 0, 0, 0, uid, 0, 0, 0, 0, 0)))

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert found(1000) and found(0) and found(1000, 0o40755)
    assert not found(1001) and not found(1000, 0o40775) and not found(0, 0o40757)


def test_a_folder_that_cannot_be_made_is_a_warning(folder, monkeypatch, caplog):
    folder.write_text("in the way")
    jaxcache.enable_compilation_cache(folder)
    assert str(folder) in said(caplog)[0]
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", classmethod(lambda cls: (_ for _ in ()).throw(RuntimeError("no home"))))
    jax.config.update("jax_compilation_cache_dir", None)
    jaxcache.enable_compilation_cache()
    assert "no home" in said(caplog)[1] and jax.config.values["jax_compilation_cache_dir"] is None


# ------------------------------------------------------------ writing


def test_a_file_is_on_disk_before_it_has_its_name(folder, monkeypatch):
    folder.mkdir(mode=0o700)
    done, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append(Path(a).name), replace(a, b)))
    write_in(folder, "a", b"1")
    write_in(folder, "a", b"2")
    assert done[0] == done[2] == "fsync" and len({*done}) == 3  # and temporary names are never the same
    assert read_in(folder, "a") == b"2" and os.listdir(folder) == ["a"]


def test_a_write_that_fails_leaves_what_was_there(folder, monkeypatch):
    folder.mkdir(mode=0o700)
    write_in(folder, "a", b"1")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_in(folder, "a", b"2")
    assert read_in(folder, "a") == b"1" and os.listdir(folder) == ["a"]


# ------------------------------------------------------------ a limit


def aged(folder: Path, name: str, seconds: float) -> None:
    used = time.time() - seconds
    os.utime(folder / name, (used, used))


def trim(folder: Path) -> None:
    blobs = store_in(folder)
    blobs.refresh_index()
    blobs.make_room(0)


def test_the_least_recently_used_programs_are_deleted_first(folder, monkeypatch):
    folder.mkdir(mode=0o700)
    for name in "abcd":
        write_in(folder, name, bytes(1000))
    for age, name in enumerate("dcba"):
        aged(folder, name, executable_cache.EVICTION_GRACE_SECONDS + 100 + age)
    assert read_in(folder, "a") is not None  # the oldest, and now the newest
    monkeypatch.setattr(executable_cache, "MAX_FOLDER_BYTES", 3 * 1100)
    write_in(folder, "e", bytes(1000))
    assert sorted(os.listdir(folder)) == ["a", "d", "e"]
    monkeypatch.setattr(executable_cache, "MAX_FOLDER_BYTES", 1)
    trim(folder)
    assert sorted(os.listdir(folder)) == ["a", "e"]


def test_a_blob_that_is_written_again_stays_within_the_limit(folder):
    folder.mkdir(mode=0o700)
    blobs = BlobStore(folder, executable_cache.PROGRAM_FORMAT, max_bytes=3 * 1100)
    for name in "abc":
        blobs.write(name, bytes(1000))
    blobs.write("a", bytes(2000))  # the least recently used
    assert blobs.nbytes == sum(file.stat().st_size for file in folder.iterdir()) <= blobs.max_bytes
    blobs.write("a", bytes(1500))  # it makes room for itself
    assert sorted(os.listdir(folder)) == ["a", "c"]


def test_two_processes_may_trim_at_once(folder, monkeypatch):
    folder.mkdir(mode=0o700)
    for name in "ab":
        write_in(folder, name, bytes(10))
        aged(folder, name, executable_cache.EVICTION_GRACE_SECONDS + 100)
    monkeypatch.setattr(executable_cache, "MAX_FOLDER_BYTES", 1)
    unlink = os.unlink
    monkeypatch.setattr(os, "unlink", lambda path: (unlink(path), unlink(path)))  # the other one was first
    trim(folder)
    assert os.listdir(folder) == []


def test_jaxs_cache_is_bounded_though_it_had_no_limit(folder, monkeypatch):
    folder.mkdir(mode=0o700)
    (folder / "old-cache").write_bytes(bytes(100_000))  # without the time of its last use
    monkeypatch.setattr(jaxcache, "MAX_CACHE_BYTES", 100_000)
    jax.config.update("jax_compilation_cache_max_size", -1)
    jaxcache.enable_compilation_cache(folder)
    assert jax.config.values["jax_compilation_cache_max_size"] == 100_000
    program(7).compile()  # jax would warn, and warnings are errors here
    assert not (folder / "old-cache").exists() and len(list(folder.glob("*-cache"))) >= 1


def test_a_size_that_the_user_has_set_stays(folder):
    jax.config.update("jax_compilation_cache_max_size", 12345678)
    jaxcache.enable_compilation_cache(folder)
    assert jax.config.values["jax_compilation_cache_max_size"] == 12345678
