"""The compiled steps update the cache in place: here, and on accelerators that are not there."""

import dataclasses
from importlib.metadata import PackageNotFoundError

import jax
import jax.numpy as jnp
import pytest

from duetto.model.tree import nbytes
from duetto.serve import targets
from duetto.serve.facts import facts
from duetto.serve.options import EngineOptions
from duetto.serve.plan import Job, abstract_arguments, compile_for, device_bytes
from duetto.serve.presets import PRESETS
from duetto.serve.programs import Shape, Sizes
from duetto.serve.targets import MissingCompiler, Target, TargetError, find_target, here

# A 0.6B model's layers with a cache of 4 GiB in bfloat16. Two of them, and a small vocabulary, since TPU programs compile slowly.
CONFIG = dataclasses.replace(PRESETS["0.6b"], layers=PRESETS["0.6b"].layers[:2], vocab_size=2048)
SIZES = Sizes(max_model_len=4096, max_num_seqs=32, pages=(8192,), page_size=64)
STEPS = [Shape("prefill", 1, 512), Shape("decode", 32, 1), Shape("decode", 32, 4)]


def target_of(name: str) -> Target:
    try:
        return here() if name == "cpu" else find_target(name)
    except MissingCompiler as error:
        pytest.skip(str(error))


def job_for(target: Target) -> Job:
    dtype = "float32" if target.devices[0].platform == "cpu" else "bfloat16"
    return Job("test", CONFIG, dtype, EngineOptions(), target, SIZES, context=1024)


@pytest.mark.parametrize("name", ["cpu", "h200", "v6e:1x1"])
@pytest.mark.parametrize("shape", STEPS, ids=str)
def test_a_step_updates_cache_and_slots_in_place(name: str, shape: Shape):
    job = job_for(target_of(name))
    arguments = abstract_arguments(job)
    found, donated = facts(compile_for(job, shape, arguments)), (arguments.cache, arguments.slots)
    assert found.aliased_leaves == len(jax.tree.leaves(donated))
    assert found.aliased >= nbytes(donated)
    assert found.temporaries < 0.05 * nbytes(arguments.cache)
    pool = nbytes(arguments.cache.k[0])
    assert not [m for m in found.moved if m.bytes >= pool / 4]


def test_eight_gpus_share_the_heads():
    job = job_for(target_of("8xh200"))
    arguments = abstract_arguments(job)
    assert device_bytes(arguments.cache) * 8 == nbytes(arguments.cache)
    found = facts(compile_for(job, Shape("decode", 32, 1), arguments))
    assert found.aliased >= device_bytes((arguments.cache, arguments.slots))
    assert found.temporaries < 0.05 * device_bytes(arguments.cache)
    assert found.collectives["all-reduce"][0] >= 2 * CONFIG.num_layers


def test_heads_that_do_not_divide_are_refused():
    job = dataclasses.replace(job_for(target_of("8xh200")), config=PRESETS["135m"])
    with pytest.raises(ValueError, match="9 heads cannot be split over 8 devices"):
        abstract_arguments(job)


def test_facts_see_what_is_copied():
    """A control: a program that must copy what it is given, and may not write over it."""
    x = jnp.zeros((1024, 2048))
    found = facts(jax.jit(lambda x: (x.T.reshape(-1), x + 1)).lower(x).compile())
    assert found.aliased == found.aliased_leaves == 0
    assert [m.bytes for m in found.moved] == [x.nbytes]
    kept = facts(jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile())
    assert (kept.aliased, kept.aliased_leaves, kept.moved) == (x.nbytes, 1, ())


@pytest.mark.parametrize("name", ["h300", "8xv6e", "v6e", "v6e:", "2x2", "-1xh200", "v7:2x2"])
def test_an_unknown_target_is_refused(name: str):
    with pytest.raises(TargetError, match="is unknown: h100, h200"):
        find_target(name)


@pytest.mark.parametrize("name, package", [("h200", "jax-cuda13-plugin"), ("v6e:2x2", "libtpu")])
def test_an_absent_compiler_is_said_with_the_remedy(name: str, package: str, monkeypatch: pytest.MonkeyPatch):
    def version(wanted: str) -> str:
        if wanted == "jax":
            return "0.0"
        raise PackageNotFoundError(wanted)

    monkeypatch.setattr(targets, "version", version)
    with pytest.raises(MissingCompiler, match=f"needs {package}: pip install"):
        find_target(name)
