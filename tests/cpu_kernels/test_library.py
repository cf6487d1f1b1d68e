"""The library of CPU kernels where it was not built, and the engine's words for it."""

import pytest
from conftest import Model

from duetto import LLM
from duetto.cpu_kernels import build, library
from duetto.model.weights import prepared


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch, tmp_path) -> library.KernelLibrary:
    found = library.library(tmp_path / "kernels.so")
    monkeypatch.setattr(prepared, "library", lambda: found)
    return found


def test_a_compiler_that_fails_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "is_supported", lambda: True)
    for command in ("/bin/false", "/no/such/compiler"):
        monkeypatch.setenv("CXX", command)
        with pytest.raises(build.BuildError, match=command):
            build.build(tmp_path / "kernels.so", tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_engine_refuses_kernels_that_are_not_there(absent, tiny: Model):
    assert not absent.isas
    with pytest.raises(ValueError, match="cpu_kernels=True is not allowed: .*was not built.*builds it"):
        LLM.from_params(tiny.config, tiny.params, cpu_kernels=True)


def test_a_library_that_cannot_be_loaded_says_why(tmp_path):
    (tmp_path / "kernels.so").write_bytes(b"no library")
    found = library.library(tmp_path / "kernels.so")
    assert not found.isas and "cannot be used: " in found.refusal


def test_the_name_of_kernels_has_their_instruction_set_and_version():
    for isa in build.ISAS:
        name = library.target("product", isa)
        assert library.isa_of(name) == isa and f"_{build.VERSION}_" in name


@pytest.mark.skipif(not library.library().isas, reason=library.library().refusal or "there are kernels")
def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setattr(library, "VERSION", build.VERSION + 1)
    built = (build.HERE / build.LIBRARY).read_bytes()
    (tmp_path / "kernels.so").write_bytes(built)
    found = library.library(tmp_path / "kernels.so")
    assert not found.isas
    assert f"of another version: {library.BUILD} builds it again" in found.refusal


def test_the_name_of_kernels_follows_what_was_built(tmp_path):
    names = set()
    for number in range(2):
        path = tmp_path / f"{number}.so"
        path.write_bytes(bytes([number]))
        names.add(library.target("product", "avx2", path))
    assert len(names) == 2 and {library.isa_of(name) for name in names} == {"avx2"}
