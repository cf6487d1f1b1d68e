"""The library of CPU kernels where it was not built, and the engine's words for it."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from suite.fixtures import Model

from duetto import LLM
from duetto.cpu_kernels import build, library
from duetto.serve.engine.startup import cpu_kernels
from duetto.serve.engine.startup.cpu_kernels import (
    build_kernels_if_requested,
    build_missing_library,
    build_or_explain,
)
from duetto.serve.options.engine import EngineOptions


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[library.KernelLibrary]:
    """None beside the sources, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "LIBRARY_NAME", "none.so")
    forget()
    yield library.load_library()
    forget()


def forget() -> None:
    build.cached_library_file.cache_clear()
    build.library_file.cache_clear()


def test_a_compiler_that_fails_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "is_supported", lambda: True)
    for command in ("/bin/false", "/no/such/compiler"):
        monkeypatch.setenv("CXX", command)
        with pytest.raises(build.BuildError, match=command):
            build.build_library(tmp_path / "kernels.so", tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_engine_refuses_kernels_that_cannot_be_built(absent, tiny: Model, monkeypatch, capfd):
    assert not absent.isas and "was not built" in absent.refusal
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setattr(build, "is_supported", lambda: True)
    with pytest.raises(ValueError, match="cpu_kernels=True is not allowed: /no/such/compiler cannot be run"):
        LLM.from_params(tiny.config, tiny.params, cpu_kernels=True)
    assert "duetto: compiling the CPU kernels, once" in capfd.readouterr().err


@pytest.mark.usefixtures("absent")
def test_an_engine_builds_kernels_into_the_cache_once(monkeypatch, tmp_path):
    made = []
    whole = build.with_checksum(b"kernels")
    monkeypatch.setattr(
        build, "build_library", lambda target, isas: (made.append(target), target.write_bytes(whole))
    )
    for _ in range(2):
        build_kernels_if_requested(EngineOptions(cpu_kernels=True), "cpu")
    build_kernels_if_requested(EngineOptions(cpu_kernels=False), "cpu")
    build_kernels_if_requested(EngineOptions(cpu_kernels=True), "gpu")
    assert made == [build.library_file()] and tmp_path in made[0].parents


def test_kernels_are_built_for_the_best_instruction_set(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "CPUINFO", tmp_path / "cpuinfo")
    assert build.processor_isas() == tuple(build.ISAS)  # the system does not say
    monkeypatch.setattr(build, "ISAS", build.ARM)
    for flags, isas in (("fp asimd", ("neon",)), ("fp asimd asimddp bf16", ("neon_bf16",)), ("fp", ())):
        build.CPUINFO.write_text(f"processor\t: 0\nFeatures\t: {flags}\n")
        assert build.processor_isas() == isas
    monkeypatch.setattr(build, "ISAS", build.X86)
    wide = "avx512f avx512bw avx512vl avx512dq"
    narrow = f"avx2 fma {wide} avx512_bf16 avx512_vnni"
    for flags, isas in (
        ("sse2 avx2 fma", ("avx2",)),
        (f"avx2 fma {wide}", ("avx512",)),
        (f"avx2 fma {wide} avx512_bf16", ("avx512",)),  # no such processor is known
        (f"{narrow} amx_bf16", ("avx512_bf16",)),
        (f"{narrow} amx_bf16 amx_tile", ("avx512_bf16", "avx512_amx")),  # and what takes its place
        ("sse2 avx2", ()),
    ):
        build.CPUINFO.write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\n")
        assert build.processor_isas() == isas
    with pytest.raises(build.BuildError, match="this processor has none of avx2, avx512"):
        monkeypatch.setattr(build, "is_supported", lambda: True)
        build.build_library(tmp_path / "kernels.so", tmp_path, build.processor_isas())


@pytest.mark.usefixtures("absent")
def test_a_cache_that_others_can_write_to_is_not_used(tmp_path):
    (tmp_path / "duetto" / "cpu_kernels").mkdir(parents=True)
    build.cached_library_file().touch()
    build.cached_library_file().chmod(0o777)
    assert "can write to it" in library.load_library().refusal
    build.cached_library_file().parent.chmod(0o777)
    with pytest.raises(build.BuildError, match="can write to it"):
        build.build_cached_library()


@pytest.mark.usefixtures("absent")
def test_another_source_is_another_library(monkeypatch, tmp_path):
    before = build.cached_library_file()
    monkeypatch.setattr(build, "COMPILER_FLAGS", (*build.COMPILER_FLAGS, "-DOTHER"))
    build.cached_library_file.cache_clear()
    assert build.cached_library_file() != before


def test_a_library_that_cannot_be_loaded_says_why(tmp_path):
    (tmp_path / "kernels.so").write_bytes(b"no library")
    found = library.load_library(tmp_path / "kernels.so")
    assert not found.isas and "cannot be used: " in found.refusal and f"delete {tmp_path}" in found.refusal


def zeroed(content: bytes, share: float) -> bytes:
    """With a page of zeros, as a bad sector leaves it."""
    at = int(share * len(content))
    return content[:at] + bytes(min(4096, len(content) - at)) + content[at + 4096 :]


@pytest.mark.parametrize("damage", [zeroed, lambda content, share: content[: int(share * len(content))]])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.75, 0.99])
def test_a_damaged_library_is_refused_before_it_is_mapped(tmp_path, share, damage):
    """`ctypes` would end the process."""
    origin = Path(str(find_spec("_ctypes").origin))  # type: ignore[union-attr]
    build.install_library(origin, tmp_path / "kernels.so")
    whole = (tmp_path / "kernels.so").read_bytes()
    assert build.is_intact(tmp_path / "kernels.so") and whole.startswith(origin.read_bytes())
    (tmp_path / "kernels.so").write_bytes(damage(whole, share))
    refusal = library.load_library(tmp_path / "kernels.so").refusal
    assert "kernels.so is damaged; delete" in refusal


def test_a_whole_library_of_something_else_is_of_another_version(tmp_path):
    build.install_library(Path(str(find_spec("_ctypes").origin)), tmp_path / "kernels.so")  # type: ignore[union-attr]
    assert "another version" in library.load_library(tmp_path / "kernels.so").refusal


@pytest.mark.usefixtures("absent")
def test_a_damaged_library_in_the_cache_is_built_again(monkeypatch, tmp_path):
    """One that a wheel brought is not: its folder may be read only."""

    def made(target: Path, **_: object) -> None:
        (tmp_path / "made").write_bytes(b"kernels")
        build.install_library(tmp_path / "made", target)

    monkeypatch.setattr(build, "build_library", made)
    build_missing_library()
    whole = build.cached_library_file().read_bytes()
    build.cached_library_file().write_bytes(zeroed(whole, 0.0))
    build_missing_library()
    assert build.cached_library_file().read_bytes() == whole
    build.cached_library_file().write_bytes(b"damaged")
    monkeypatch.setattr(cpu_kernels, "SOURCE_FOLDER", build.cached_library_file().parent)
    build_missing_library()
    assert build.cached_library_file().read_bytes() == b"damaged"


@pytest.mark.usefixtures("absent")
def test_a_cache_that_may_not_be_read_is_no_library(monkeypatch, tmp_path):
    """The tests may run as root, who may read everything."""

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    build.library_file()
    monkeypatch.setattr(os, "stat", refused)
    assert "was not built" in library.load_library().refusal
    assert library.ffi_target_name("product", "avx2").endswith("_")
    assert "Permission denied" in build_or_explain()


def test_cxx_is_a_command(monkeypatch):
    for told, command in (("", ["c++"]), (" ", ["c++"]), ("ccache g++", ["ccache", "g++"])):
        monkeypatch.setenv("CXX", told)
        assert build.compiler_command() == command
    monkeypatch.setenv("CXX", "g++ '")
    with pytest.raises(build.BuildError, match="CXX is not a command: No closing quotation"):
        build.compiler_command()


def test_a_full_disk_keeps_no_part_of_a_library(monkeypatch, tmp_path):
    def full(_: int) -> None:
        raise OSError("No space left on device")

    (tmp_path / "made").write_bytes(b"kernels")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        build.install_library(tmp_path / "made", tmp_path / "kernels.so")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_the_name_of_kernels_has_their_instruction_set_and_version():
    for isa in build.ISAS:
        name = library.ffi_target_name("product", isa)
        assert library.target_isa(name) == isa and f"_{build.VERSION}_" in name


def test_a_process_keeps_its_library_after_a_later_build(absent, monkeypatch, tmp_path):
    before = library.ffi_target_name("product", "avx2")
    (tmp_path / build.LIBRARY_NAME).write_bytes(b"built later")
    monkeypatch.setattr(build, "SOURCE_FOLDER", tmp_path)
    assert library.ffi_target_name("product", "avx2") == before


@pytest.mark.skipif(
    not library.load_library().isas, reason=library.load_library().refusal or "there are kernels"
)
def test_an_instruction_set_whose_products_are_wrong_is_left_out(monkeypatch: pytest.MonkeyPatch):
    best, *others = library.load_library().isas
    monkeypatch.setattr(library, "has_correct_products", lambda _, isa: isa != best)
    found = library.register_library.__wrapped__(build.library_file())
    assert found.isas == tuple(others) and found.refusal.startswith(f"not {best}: its products are wrong")


@pytest.mark.skipif(
    not library.load_library().isas, reason=library.load_library().refusal or "there are kernels"
)
def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setattr(library, "VERSION", build.VERSION + 1)
    built = build.library_file().read_bytes()
    (tmp_path / "kernels.so").write_bytes(built)
    found = library.load_library(tmp_path / "kernels.so")
    assert not found.isas
    assert f"of another version: delete {tmp_path}" in found.refusal


def test_the_name_of_kernels_follows_what_was_built(tmp_path):
    names = set()
    for number in range(2):
        path = tmp_path / f"{number}.so"
        path.write_bytes(bytes([number]))
        names.add(library.ffi_target_name("product", "avx2", path))
    assert len(names) == 2 and {library.target_isa(name) for name in names} == {"avx2"}
