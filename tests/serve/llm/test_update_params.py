"""Weights of a trainer: masters of another dtype or layout, and buffers that its next step donates."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.requests import GREEDY, IDS, SIZES, exact
from jax.experimental.layout import Format, Layout

from duetto import LLM, SamplingParams
from duetto.compat.async_llm import AsyncLLM
from duetto.model.transformer import Decoder
from duetto.model.tree import leaves_by_path

pytestmark = pytest.mark.usefixtures("few_shapes", "greedy_only")
SCORED = replace(GREEDY, logprobs=0)


@pytest.fixture(scope="module")
def masters(one_layer) -> Decoder:
    """Numbers in float32 that no 16-bit dtype has."""
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.1, x.shape), jnp.float32), one_layer.params)


def in_dtype(params: Decoder, dtype: str) -> Decoder:
    """Round by NumPy. The result shares no array with the original."""
    return jax.tree.map(lambda x: jnp.array(np.asarray(x).astype(jnp.dtype(dtype))), params)


@pytest.fixture
def serve(one_layer):
    def start(params: Decoder, **options) -> LLM:
        return LLM.from_params(one_layer.config, params, **(SIZES | {"max_num_seqs": 2} | options))

    return start


@pytest.fixture
def llm(serve, masters) -> Iterator[LLM]:
    with serve(jax.tree.map(jnp.copy, masters)) as llm:
        yield llm


def answers(llm: LLM) -> list[tuple]:
    return exact(llm.generate([IDS, IDS[:2]], SCORED, use_tqdm=False))


@partial(jax.jit, donate_argnums=0)
def train_step(params: Decoder) -> Decoder:
    return jax.tree.map(lambda x: x * 1.5, params)


@pytest.mark.parametrize("options", [{}, {"cpu_kernels": True}, {"quantization": "int8"}], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_masters_are_rounded_to_the_served_dtype(serve, masters, dtype, options):
    rounded = in_dtype(masters, dtype)
    with serve(rounded, **options) as llm:
        assert llm.served_dtype == jnp.dtype(dtype)
        expected = answers(llm)
        llm.update_params(jax.tree.map(lambda x: -x, masters))
        assert answers(llm) != expected
        compiled = llm.report()["compilations"]  # the conversion of each shape is compiled once
        llm.update_params(masters)
        assert answers(llm) == expected and llm.report()["compilations"] == compiled
        for path, x in leaves_by_path(llm.params).items():
            if "quantization" not in options:
                assert np.asarray(x).tobytes() == np.asarray(leaves_by_path(rounded)[path]).tobytes(), path
        masters_again = train_step(jax.tree.map(jnp.copy, masters))
        llm.update_params(masters_again)
        later = answers(llm)
        train_step(masters_again)  # the engine has copies, also without `copy`
        assert answers(llm) == later != expected


@pytest.mark.parametrize("is_mixed", [False, True], ids=["same", "mixed"])
def test_a_train_step_may_donate_what_was_copied(llm, masters, is_mixed):
    params = jax.tree.map(lambda x: x * 0.5, masters)
    if is_mixed:  # a parameter of another dtype: all are copied
        params = replace(params, embed=params.embed.astype(jnp.bfloat16))
    llm.update_params(params, copy=not is_mixed)
    expected = answers(llm)
    trained = train_step(params)
    assert all(x.is_deleted() for x in jax.tree.leaves(params))
    assert answers(llm) == expected
    with pytest.raises(ValueError, match="parameter embed was deleted or donated"):
        llm.update_params(params, copy=True)
    assert answers(llm) == expected
    llm.update_params(trained, mode="keep", copy=True)
    assert answers(llm) != expected


def test_without_a_copy_the_arrays_are_the_callers(llm, masters):
    params = jax.tree.map(lambda x: x * 0.5, masters)
    llm.update_params(params)
    assert all(a is b for a, b in zip(jax.tree.leaves(llm.params), jax.tree.leaves(params), strict=True))
    llm.update_params(params, copy=True)
    assert not {id(x) for x in jax.tree.leaves(llm.params)} & {id(x) for x in jax.tree.leaves(params)}


def test_another_layout_is_laid_out_again(llm, masters):
    expected = answers(llm)
    turned = jax.tree.map(
        lambda x: jax.device_put(x, Format(Layout(tuple(range(x.ndim))[::-1]), x.sharding)), masters
    )
    llm.update_params(turned)
    assert answers(llm) == expected


def test_refused_weights_leave_the_others_served(serve, masters):
    with serve(in_dtype(masters, "float16")) as llm:
        expected, version = answers(llm), llm.engine.weights_version
        huge = replace(masters, embed=masters.embed.at[0, 0].set(1e6))  # no number of float16
        ints = replace(masters, embed=masters.embed.astype(jnp.int32))
        short = replace(masters, head=masters.head[:-1])
        for wrong, said in (
            (huge, "parameter embed holds NaN or infinity as float16"),
            (ints, r"update_params: embed is int32\[.*expected float16"),
            (short, r"update_params: head is float32\[.*expected float16"),
            (replace(masters, layers=()), r"update_params: layers.0.* is missing, expected float16"),
        ):
            with pytest.raises(ValueError, match=said):
                llm.update_params(wrong, copy=True)
        assert answers(llm) == expected and llm.engine.weights_version == version


def test_sleep_takes_masters_of_another_dtype(serve, masters):
    rounded = in_dtype(masters, "bfloat16")
    with serve(rounded) as llm:
        expected = answers(llm)
        for level in (1, 2):
            llm.sleep(level)
            assert llm.served_dtype == jnp.bfloat16
            llm.update_params(masters)
            llm.wake_up()
            assert answers(llm) == expected


def test_rollout_workers_find_the_methods_they_call(llm, masters):
    """What the engine actors of OpenRLHF and verl call of an engine, between two sets of weights."""

    async def sample(engine: AsyncLLM, id: str) -> tuple[list[int], list[float]]:
        prompt = {"prompt_token_ids": IDS}
        params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=0, repetition_penalty=1.0)
        last = [output async for output in engine.generate(prompt, params, request_id=id)][-1].outputs[0]
        return last.token_ids, [at[t].logprob for t, at in zip(last.token_ids, last.logprobs, strict=True)]

    async def rounds() -> list[tuple]:
        engine = AsyncLLM(llm)
        first = await sample(engine, "a")
        await engine.pause_generation(mode="keep")
        waiting = asyncio.create_task(sample(engine, "b"))
        await asyncio.to_thread(llm.update_params, jax.tree.map(lambda x: -x, masters), "keep", True)
        await engine.resume_generation()
        second = await waiting
        await engine.reset_prefix_cache()
        await engine.sleep(level=1)
        for tag in ("weights", "kv_cache"):
            await engine.wake_up(tags=[tag])
        return [first, second, await sample(engine, "c")]

    first, second, third = asyncio.run(rounds())
    assert first != second == third and len(first[0]) == len(first[1]) == 6
