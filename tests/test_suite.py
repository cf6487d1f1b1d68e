"""The suite's marks, workers, mutants and patches of jax, and what stands in for the library's programs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from suite import groups, jax_patches, quick
from suite.groups import pytest_xdist_auto_num_workers
from suite.marks import full, full_if
from suite.mutations import draw_mutants, find_mutants

from duetto.serve.runtime.compiled import executable_cache


@full_if(lambda size, dtype: size == 2 and dtype == "int8")
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("size", [1, 2, full(3)])
def test_repetitions_are_marked(request: pytest.FixtureRequest, size: int, dtype: str):
    is_marked = request.node.get_closest_marker("full") is not None
    assert is_marked == (size == 3 or (size, dtype) == (2, "int8"))
    assert not is_marked or request.config.getoption("full") or "full" in request.config.option.markexpr


@pytest.mark.parametrize(
    "cores, gib, of_a_container, workers",
    [
        (1, 4, "max", 2),
        (4, 64, "max", 4),
        (16, 64, "max", 8),
        (16, 32, "max", 5),
        (64, 512, str(18 << 30), 3),
    ],
)
def test_workers_have_cores_and_memory(monkeypatch, tmp_path, cores, gib, of_a_container, workers):
    (tmp_path / "memory.max").write_text(f"{of_a_container}\n")
    monkeypatch.setattr(groups, "OF_A_CONTAINER", tmp_path / "memory.max")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores), raising=False)
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": gib << 18, "SC_PAGE_SIZE": 1 << 12}.get)
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    assert pytest_xdist_auto_num_workers() == workers
    monkeypatch.setattr(groups, "OF_A_CONTAINER", tmp_path / "missing")
    assert pytest_xdist_auto_num_workers() >= workers
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "3")
    assert pytest_xdist_auto_num_workers() is None


@pytest.mark.parametrize(
    "dtype, shape",
    [
        ("float32", ()), ("float32", (5,)), ("float32", (3, 4, 7)), ("bfloat16", (3, 4, 7)),
        ("float8_e4m3fn", (5, 2)), ("int8", (5, 2)), ("uint8", (5, 2)), ("int4", (5, 2)),
    ],
)  # fmt: skip
def test_weights_are_examined_by_numpy_as_on_devices(dtype: str, shape: tuple[int, ...]):
    drawn = np.random.default_rng(0).normal(size=shape) * 4
    own = jax.device_put(drawn.astype(jnp.dtype(dtype)))
    np.testing.assert_array_equal(quick.digest(own), quick.ON_DEVICES["digest"](own))
    assert quick.fingerprint([own, own]) == quick.ON_DEVICES["fingerprint"]([own, own])
    if jnp.issubdtype(own.dtype, jnp.floating):
        wrong = [jax.device_put(np.full(shape, value, own.dtype)) for value in (np.nan, np.inf)]
        for x in (own, *wrong):
            assert quick.all_finite(x) == quick.ON_DEVICES["all_finite"](x)


def test_jax_has_the_private_names_that_are_patched():
    assert not jax_patches.DIFFERENCES, ". ".join(jax_patches.DIFFERENCES.values())


@pytest.mark.parametrize(
    "name",
    ["jax._src.compiler:get_compile_options", "jax._src.compiler:no_function", "jax.no_module:function"],
)
def test_a_patch_of_an_unknown_name_is_not_applied(monkeypatch, name: str):
    applied = list[str]()
    monkeypatch.setattr(jax_patches, "DIFFERENCES", {})
    monkeypatch.setattr(jax_patches, "PATCHES", {lambda: applied.append(name): {name: "module, devices"}})
    jax_patches.apply_patches()
    (sentence,) = jax_patches.DIFFERENCES.values()
    assert f"jax {jax.__version__} has no {name}(module, devices)" in sentence
    assert f"in jax {jax_patches.VERSIONS}: the suite runs without this patch" in sentence
    assert applied == []


@pytest.fixture
def jax_cache(tmp_path: Path) -> Iterator[Callable[[], int]]:
    """Give jax an empty cache; return a function that counts its programs."""
    folder, before = tmp_path / "cache", jax.config.values["jax_compilation_cache_dir"]
    change_cache(folder)
    yield lambda: len(list(folder.glob("*-cache")))
    change_cache(before)


def change_cache(folder: Any) -> None:
    jax.config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()


def needs_patch(patch: Callable[[], None]) -> pytest.MarkDecorator:
    return pytest.mark.skipif(patch in jax_patches.DIFFERENCES, reason=jax_patches.DIFFERENCES.get(patch, ""))


@needs_patch(jax_patches.patch_compile_options)
@pytest.mark.skipif(not jax_patches.has_older_emitters(), reason="this XLA has no older emitters")
@pytest.mark.parametrize("is_as_served", [False, True])
def test_programs_have_the_older_emitters_unless_they_are_as_served(jax_cache, is_as_served: bool):
    """By the number of programs in jax's cache, whose keys hold the options."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", not is_as_served)
    try:
        (program := jax.jit(lambda x: x * 3))(np.float32(1))
        assert jax_cache() == 1
        program.lower(np.float32(1)).compile(jax_patches.OLDER_EMITTERS)
        assert jax_cache() == (2 if is_as_served else 1)
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@needs_patch(jax_patches.patch_serialization)
def test_programs_of_the_jax_cache_are_stored_with_machine_code(jax_cache):
    for key in ("a" * 64, "b" * 64):
        jax.clear_caches()
        program = jax.jit(lambda x: jnp.sin(x) * 5).lower(np.ones(3, np.float32))
        executable_cache.compile_and_store(key, program)
        assert jax_cache() == 1  # the second comes from there
        stored = executable_cache.load_program(key, jax.devices()[0])
        np.testing.assert_allclose(stored(np.ones(3, np.float32)), 5 * np.sin(np.ones(3)), rtol=1e-6)


SOURCE = '"""A text."""\nLIMIT: int = 3\n\n\ndef f(x: int, y: int = 2) -> int:\n    """Another."""\n' + (
    "    g(x, y)\n    x += 1\n    if x < y and y:\n        return x * y\n    raise ValueError(1)\n"
)
MUTATED = {
    "LIMIT: int = (4)", "y: int = (3)", "    (g(y, x))", "    pass\n    x += 1", "    g(x, y)\n    pass",
    "x += (2)", "if (x <= y) and y", "if (x < y or y)", "if (not (x < y and y))", "return (x // y)",
    "        return None",
}  # fmt: skip


def test_mutants_are_those_of_the_code_alone(tmp_path):
    (file := tmp_path / "a.py").write_text(SOURCE)
    mutants = list(find_mutants(tmp_path, file))
    texts = [mutant.apply(SOURCE.encode()).decode() for mutant in mutants]
    assert len(texts) == len(MUTATED)
    assert {part for part in MUTATED if any(part in text for text in texts)} == MUTATED
    drawn = [draw_mutants(mutants, lambda name: name, 4, seed=1) for _ in range(2)]
    assert drawn[0] == drawn[1] and len({mutant.line for mutant in drawn[0]}) == 4
