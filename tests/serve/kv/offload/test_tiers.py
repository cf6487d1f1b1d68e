"""Pages in the host's memory and in files: bounded, and never another's or a damaged one's."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from duetto.serve.host.blob_store import ABANDONED_SECONDS, FileEntry
from duetto.serve.kv.offload.disk import FOLDER_DIGITS, PAGE_FORMAT, DiskTier, create_page_folder
from duetto.serve.kv.offload.host import HostTier
from duetto.serve.kv.offload.tier import TierChain, page_key

REALM, OTHER = b"r" * 32, b"s" * 32
PAGE = 100  # bytes


def key(i: int) -> bytes:
    return page_key(i.to_bytes(16, "big"), 0)


def content(i: int) -> bytes:
    return bytes([i % 256]) * PAGE


def on_disk(folder: Path, pages: int = 100, realm: bytes = REALM) -> DiskTier:
    return DiskTier(folder, realm, pages * (PAGE_FORMAT.header_bytes + PAGE))


@pytest.fixture(params=["host", "disk"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> HostTier | DiskTier:
    """Room for three pages."""
    return HostTier(3 * PAGE) if request.param == "host" else on_disk(tmp_path / "pages", 3)


def test_least_recently_used_pages_are_evicted_first(tier):
    for i in range(3):
        tier.offer(key(i), content(i))
    assert tier.fetch(key(0)) == content(0)
    tier.offer(key(3), content(3))
    assert [tier.has(key(i)) for i in range(4)] == [True, False, True, True]
    assert tier.fetch(key(1)) is None and tier.fetch(key(3)) == content(3)
    assert tier.report()["pages"] == 3 and tier.report()["hits"] == 2


def test_pages_larger_than_the_tier_are_not_kept(tier):
    tier.offer(key(0), content(0))
    tier.offer(key(1), bytes(10 * PAGE))
    assert tier.has(key(0)) and not tier.has(key(1))


def test_a_page_that_is_offered_again_takes_no_more_room(tier):
    for _ in range(5):
        tier.offer(key(0), content(0))
    assert tier.report()["pages"] == 1 and tier.report()["bytes"] in (PAGE, PAGE_FORMAT.header_bytes + PAGE)


def test_a_quicker_tier_gets_what_a_slower_one_has(tmp_path):
    slow, quick = on_disk(tmp_path), HostTier(10 * PAGE)
    slow.offer(key(0), content(0))
    both = TierChain([quick, slow])
    assert both.has(key(0)) and not quick.has(key(0))
    assert both.fetch(key(0)) == content(0) and quick.has(key(0))
    both.offer(key(1), content(1))
    assert quick.has(key(1)) and slow.has(key(1))
    assert set(both.report()) == {"host", "disk"} and both.is_writable
    assert not TierChain([DiskTier(tmp_path, REALM, 0)]).is_writable


# ---------------------------------------------------------------- files


def test_processes_find_each_others_pages_of_the_same_realm(tmp_path):
    first, second, stranger = on_disk(tmp_path), on_disk(tmp_path), on_disk(tmp_path, realm=OTHER)
    first.offer(key(0), content(0))
    assert not second.has(key(0))
    second.refresh()
    stranger.refresh()
    assert second.fetch(key(0)) == content(0) and not stranger.has(key(0))
    assert on_disk(tmp_path).fetch(key(0)) == content(0)


def test_what_is_written_during_a_refresh_is_there_after_it(tmp_path, monkeypatch):
    tier = on_disk(tmp_path)
    tier.offer(key(0), content(0))
    folder = tier.file_name(key(0))[:FOLDER_DIGITS]
    second = next(i for i in range(1, 10_000) if tier.file_name(key(i)).startswith(folder))
    files = tier.blobs._scan

    def meanwhile(place: str) -> list[FileEntry]:
        found = files(place)
        tier.offer(key(second), content(second))
        return found

    monkeypatch.setattr(tier.blobs, "_scan", meanwhile)
    tier.blobs._changed.clear()
    tier.refresh()
    assert tier.has(key(second)) and tier.fetch(key(second)) == content(second)
    assert tier.blobs.nbytes == 2 * (PAGE_FORMAT.header_bytes + PAGE)


def test_files_of_other_realms_take_room_too(tmp_path):
    on_disk(tmp_path, realm=OTHER).offer(key(0), content(0))
    tier = on_disk(tmp_path, 2)
    for i in range(1, 3):
        tier.offer(key(i), content(i))
    stranger = on_disk(tmp_path, realm=OTHER)
    assert tier.has(key(1)) and tier.has(key(2)) and not stranger.has(key(0))


def damage(file: Path, how: str) -> None:
    found = bytearray(file.read_bytes())
    if how == "flipped":
        found[-1] ^= 1
    elif how == "cut":
        del found[-1:]
    elif how == "empty":
        found.clear()
    elif how == "longer":
        found += b"\0"
    file.write_bytes(found)


@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "longer"])
def test_a_damaged_file_is_no_page(tmp_path, how):
    tier = on_disk(tmp_path)
    tier.offer(key(0), content(0))
    (file,) = tmp_path.rglob("*.page")
    damage(file, how)
    assert tier.fetch(key(0)) is None and not file.exists() and not tier.has(key(0))
    assert tier.report()["damaged"] == 1 and tier.report()["pages"] == 0
    tier.offer(key(0), content(0))
    assert tier.fetch(key(0)) == content(0)


def test_a_file_with_another_pages_name_is_refused(tmp_path):
    tier = on_disk(tmp_path)
    tier.offer(key(0), content(0))
    (zero,) = tmp_path.rglob("*.page")
    tier.offer(key(1), content(1))
    (one,) = set(tmp_path.rglob("*.page")) - {zero}
    one.write_bytes(zero.read_bytes())
    assert tier.fetch(key(1)) is None and tier.fetch(key(0)) == content(0)


def test_a_file_that_is_gone_is_no_page(tmp_path):
    tier = on_disk(tmp_path)
    tier.offer(key(0), content(0))
    next(tmp_path.rglob("*.page")).unlink()
    assert tier.has(key(0)) and tier.fetch(key(0)) is None and not tier.has(key(0))


def test_saving_a_page_rewrites_its_cut_off_file(tmp_path):
    on_disk(tmp_path).write(key(0), content(0))
    (file,) = tmp_path.rglob("*.page")
    whole = file.read_bytes()
    damage(file, "cut")
    on_disk(tmp_path).write(key(0), content(0))
    assert file.read_bytes() == whole


def test_files_of_others_in_the_folder_stay_there(tmp_path):
    """Whatever they are called, and however old they are, as the folder fills up."""
    mine, pages = [], tmp_path / "pages"
    for name in ("in/index.page", "en/.partial-download", "ab/cdef.page", "ab/ab.page", "notes.page"):
        mine.append(pages / name)
        mine[-1].parent.mkdir(parents=True, exist_ok=True)
        mine[-1].write_bytes(b"mine" * PAGE)
        os.utime(mine[-1], (0, 0))
    pages.chmod(0o700)
    tier = on_disk(pages, 3)
    for i in range(5):
        tier.offer(key(i), content(i))
    tier.refresh()
    assert tier.report()["pages"] == 3 and all(file.read_bytes() == b"mine" * PAGE for file in mine)


def refused(path: Path | str) -> str:
    with pytest.raises(ValueError) as found:
        create_page_folder(path, "kv_disk_path")
    return str(found.value)


def test_unusable_page_folders_are_named_with_the_argument(tmp_path, monkeypatch):
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to("nowhere")
    assert refused(file) == f"kv_disk_path: {str(file)!r} is not allowed for pages: {file} is no folder"
    assert "file is no folder" in refused(file / "below") and "link is no folder" in refused(link)
    assert "embedded null" in refused("a\0b") and "expected a folder" in refused("")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "you may not write there" in refused(tmp_path)


def test_a_path_may_begin_with_the_users_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (
        create_page_folder("~/pages", "kv_disk_path")
        == tmp_path / "pages"
        == create_page_folder(tmp_path / "pages", "")
    )


def test_a_full_disk_stores_nothing_and_raises_nothing(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    tier = on_disk(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        tier.offer(key(0), content(0))
    assert not tier.has(key(0)) and not [f for f in tmp_path.rglob("*") if f.is_file()]
    tier.offer(key(0), content(0))
    assert tier.fetch(key(0)) == content(0)


def test_leftover_files_are_deleted_once_nothing_writes_them(tmp_path):
    tier = on_disk(tmp_path)
    tier.offer(key(0), content(0))
    folder = next(tmp_path.rglob("*.page")).parent
    old, new = folder / f"{PAGE_FORMAT.partial_prefix}old", folder / f"{PAGE_FORMAT.partial_prefix}new"
    old.touch()
    new.touch()
    os.utime(old, (0, old.stat().st_mtime - 2 * ABANDONED_SECONDS))
    on_disk(tmp_path)
    assert not old.exists() and new.exists()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system has no users")
def test_files_and_folders_are_the_users_only(tmp_path):
    place = tmp_path / "a" / "pages"
    on_disk(place).offer(key(0), content(0))
    modes = {oct(p.stat().st_mode & 0o777) for p in [place.parent, place, *place.rglob("*")] if p.is_dir()}
    assert modes == {"0o700"}
    (file,) = place.rglob("*.page")
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o666)
    assert on_disk(place).fetch(key(0)) is None
    place.chmod(0o777)
    with pytest.raises(ValueError, match="others own it or can write"):
        on_disk(place)


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
from duetto.serve.kv.offload.disk import DiskTier, PAGE_FORMAT
from duetto.serve.kv.offload.tier import page_key
size, folder = 20_000, Path(sys.argv[1])
for turn in range(50):
    # room for fewer than are written
    tier = DiskTier(folder, b"r" * 32, 40 * (PAGE_FORMAT.header_bytes + size))
    child = os.fork()
    if not child:
        for i in range(turn, 10_000):
            tier.offer(page_key((i % 97).to_bytes(16, "big"), 0), bytes([i % 97]) * size)
    time.sleep(random.Random(turn).uniform(0, 0.01))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
tier = DiskTier(folder, b"r" * 32, 40 * (PAGE_FORMAT.header_bytes + size))
found = [i for i in range(97) if (page := tier.fetch(page_key(i.to_bytes(16, "big"), 0))) is not None
         and (page == bytes([i]) * size or sys.exit(f"page {i} is wrong"))]
assert tier.counts.damaged == 0, "a file was not whole"
print(len(found))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_fifty_kills_leave_whole_pages_or_none(tmp_path):
    found = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path], check=False, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) > 0


def test_temporarily_unreadable_pages_are_counted_again(tmp_path, monkeypatch, caplog):
    """Or the files of a folder would outgrow its limit."""
    tier = on_disk(tmp_path)
    tier.offer(key(1), content(1))
    before, opened = tier.blobs.nbytes, os.open

    def lacking(*given: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", lacking)
    assert tier.fetch(key(1)) is None and "Too many open files" in caplog.text
    monkeypatch.setattr(os, "open", opened)
    tier.refresh()
    assert tier.fetch(key(1)) == content(1) and tier.blobs.nbytes == before
