"""The suite's own tables agree with its tests, and what stands in for the library's programs with these."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suite import groups, quick
from suite.groups import UNMATCHED, pytest_xdist_auto_num_workers


def test_each_row_of_repetitions_matches_a_test(request: pytest.FixtureRequest):
    if any("::" in argument for argument in request.config.args):
        pytest.skip("single tests were asked for")
    assert request.config.stash[UNMATCHED] == []


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
