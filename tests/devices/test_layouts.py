"""Layouts of two devices that options ask for."""

import re
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import weights
from cases.models import EXPERTS, TINY
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from suite import quick
from suite.fixtures import Model, random_model
from suite.marks import full, full_if

from duetto import LLM, SamplingParams
from duetto.checkpoints import huggingface
from duetto.kvcache.kernels.recurrent_step import StatePages, step_pages
from duetto.kvcache.quantised import choose_cache_format
from duetto.model.config import Dense, Experts, GroupedQuery, Latent, LayerKind, ModelConfig
from duetto.model.draft_pair import PairConfig
from duetto.model.experts import MoE, experts_spec, run_moe
from duetto.model.recurrent.linear import Terms
from duetto.model.sharding import Layout, device_bytes, make_axis_rules, make_shardings, sharded_axes
from duetto.model.tree import is_spec, tree_bytes
from duetto.model.weights import device_forms as prepared_forms
from duetto.model.weights.compression.compress import compress, projection_plan
from duetto.model.weights.device_forms import PaddedEmbedding, convert_to_device_forms
from duetto.sampling.checks import LOGPROBS_MODES
from duetto.sampling.params import request_knobs
from duetto.sampling.sample import sample
from duetto.sampling.search import argmax
from duetto.sampling.state import empty_sampling_state, load_knobs
from duetto.serve.engine.startup.mesh import layout_axis_rules, param_shardings, place_params
from duetto.serve.kv.offload.realm import hash_page_realm
from duetto.serve.runtime.compiled.sizing import stage_budgets

SMALL = {  # a cache of one request's length for two that run: the first two preempt each other
    "max_model_len": 160, "max_batched_token_mem": 160, "max_num_seqs": 2, "max_prefill_tokens": 64,
    "page_size": 16, "reproducible": False,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[(k * i * i + i) % 300 for i in range(n)] for k, n in enumerate((62, 110, 3))]
TWO, TWO_WITH_EXPERTS = Layout(2), Layout(2, expert_parallel=True)


def mesh_of(**axes: int) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(*axes.values()), tuple(axes))


def generated(llm: LLM, prompts=PROMPTS) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, GREEDY, use_tqdm=False)]


def drawn(config: ModelConfig, name: str = "drawn") -> Model:
    return Model(name, config, weights.drawn(weights.decisive(config)))


def sharing(config: ModelConfig) -> ModelConfig:
    """With one key head, which two devices share, and a vocabulary that they cannot split."""
    layers = [replace(k, mixer=replace(k.mixer, num_kv_heads=1, sinks=True)) for k in config.layers]
    return replace(config, layers=tuple(layers), vocab_size=301)


@pytest.mark.full
@pytest.mark.parametrize(
    "name, layout, own",
    [
        ("one key head", TWO, {"kv": 1, "group": 2}),
        ("windows", TWO_WITH_EXPERTS, {"tensor": 2}),
        ("latent", TWO_WITH_EXPERTS, {"tensor": 2}),
    ],
)
def test_served_tokens_are_those_of_one_device(name: str, layout: Layout, own: dict[str, int], oracle):
    model = drawn(sharing(TINY)) if name == "one key head" else random_model(name)
    expected = [oracle(model)(prompt, GREEDY) for prompt in PROMPTS]
    asked = {"tensor_parallel_size": layout.tensor, "enable_expert_parallel": layout.expert_parallel}
    with LLM.from_params(model.config, model.params, **SMALL | asked) as llm:
        mesh: Any = llm.params.embed.sharding
        assert dict(mesh.mesh.shape) == own and llm.get_world_size() == 2
        assert generated(llm) == expected == [generated(llm, [prompt])[0] for prompt in PROMPTS]
        for layer in llm.params.layers:
            if isinstance(layer.ffn, MoE):
                up = layer.ffn.experts.up
                assert up.sharding.shard_shape(up.shape)[0] * 2 == up.shape[0]
                assert device_bytes(layer.ffn.experts) * 2 == tree_bytes(layer.ffn.experts)
        if name == "windows":  # pages are named after the mesh too
            others = place_params(param_shardings(model.config, TWO), model.params), model.params, llm.params
            assert len({hash_page_realm(llm.engine.programs, p, llm.options) for p in others}) == 3


TPU_LAYOUTS = {  # and key heads in their pools, of rows of 128 numbers: of 4 and 2 heads of 64
    "split": ({"tensor_parallel_size": 2}, [2, 1, 2]),
    "split, in 8 bits": ({"tensor_parallel_size": 2, "kv_cache_dtype": "int8"}, [4, 1, 2]),
    "shards": ({"data_parallel_size": 2, "max_batched_token_mem": 320}, [2, 1, 1]),
}


@full_if(lambda heads: heads != TPU_LAYOUTS["split"][1])
@pytest.mark.parametrize("asked, heads", TPU_LAYOUTS.values(), ids=TPU_LAYOUTS)
def test_rows_fill_the_lanes_of_several_tpus(
    asked: dict[str, Any], heads: list[int], monkeypatch: pytest.MonkeyPatch
):
    """Two of a device's heads lie side by side, other rows have zeros behind them: the tokens stay, and pages
    are counted with their zeros. Experts lie whole, since their parts would not fill lanes."""
    mixers = GroupedQuery(8, 4, 64), Latent(4, 72, 16, 8, 16, 24), GroupedQuery(8, 2, 64)
    ffns = Experts(4, 2, 64), Dense(64), Dense(64)
    config = ModelConfig(384, 48, tuple(map(LayerKind, mixers, ffns)), 256)
    model = drawn(config)
    with LLM.from_params(config, model.params, **SMALL | asked) as llm:
        expected = generated(llm)
    monkeypatch.setattr(prepared_forms, "is_tpu", lambda _: True)
    with LLM.from_params(config, model.params, **SMALL | asked) as llm:
        assert generated(llm) == expected
        params, programs, options = llm.engine.params, llm.engine.programs, llm.options
        assert isinstance(params.embed, PaddedEmbedding)
        mixture: Any = params.layers[0].ffn
        assert (sharded_axes(mixture.experts.up, 0) == ("tensor",)) == (options.tensor_parallel_size > 1)
        cache, sizes = programs.abstract_arguments.cache, programs.sizes
        assert [(pool.shape[0], pool.shape[-1]) for pool in cache.k] == [(n, 128) for n in heads]
        [room] = stage_budgets(PairConfig(config), options, params, None)
        kept = choose_cache_format(options.kv_cache_dtype, jnp.dtype("float32"))
        page = sum(room.page_bytes(config.layers, options.page_size, kept).values())
        assert tree_bytes(cache) == sizes.shards * sizes.pages[0] * page


@pytest.mark.parametrize(
    "lanes, count, size, data, whole",
    [
        (128, 4, 64, 1, True),
        (128, 4, 256, 1, False),  # a part fills the lanes
        (128, 3, 64, 1, False),  # three experts cannot be split over two devices
        (128, 4, 64, 2, False),
        (1, 4, 64, 1, False),
    ],
)
def test_tpus_split_whole_experts_where_parts_would_be_copied(
    lanes: int, count: int, size: int, data: int, whole: bool
):
    mesh = mesh_of(tensor=2) if data == 1 else mesh_of(data=2, tensor=1)
    layers = (LayerKind(GroupedQuery(4, 2, 8), Experts(count, 2, size)),)
    rules = layout_axis_rules(Layout(2 // data, data=data), layers, mesh, lanes)
    assert ("expert_ffn" not in rules) == whole


@pytest.mark.full
def test_a_folder_is_loaded_as_the_options_say(tiny, oracle, tmp_path):
    huggingface.save_hf(tmp_path, tiny.config, tiny.params)
    with LLM(tmp_path, tensor_parallel_size=2, **SMALL) as llm:
        assert device_bytes(llm.params.embed) * 2 == tree_bytes(llm.params.embed)
        assert generated(llm, PROMPTS[:1]) == [oracle(tiny)(PROMPTS[0], GREEDY)]


def test_what_devices_cannot_do_is_refused_with_what_they_can(tiny, tmp_path):
    huggingface.save_hf(tmp_path, tiny.config, tiny.params)
    with pytest.raises(ValueError, match="tensor_parallel_size 4 is not allowed: 6 heads .* so; 1, 2, 6 can"):
        LLM(tmp_path, tensor_parallel_size=4)
    with pytest.raises(ValueError, match="tensor_parallel_size 6 is not allowed: devices here are 2"):
        LLM(tmp_path, tensor_parallel_size=6)
    with pytest.raises(ValueError, match="tensor_parallel_size 3 is not allowed: the mesh has 2 devices"):
        LLM(tmp_path, tensor_parallel_size=3, mesh=mesh_of(tensor=2))
    split = place_params(param_shardings(tiny.config, TWO), tiny.params)
    with pytest.raises(ValueError, match="not allowed: the parameters lie on 2 devices"):
        LLM.from_params(tiny.config, split, tensor_parallel_size=3, **SMALL)
    wide = replace(EXPERTS, size=96)
    grouped = drawn(replace(tiny.config, layers=(LayerKind(tiny.config.layers[0].mixer, wide),)))
    with pytest.raises(
        ValueError, match="layer 0: experts .* cannot be split over 2 .* enable_expert_parallel"
    ):
        LLM.from_params(grouped.config, grouped.params, tensor_parallel_size=2, quantization="int4", **SMALL)


# ---------------------------------------------------------------- experts, sampling


SHARED = replace(EXPERTS, size=128)
BIASED = Experts(4, 2, 64, "clamped_silu", clamp=2.0, bias=True, router_bias=True)


@full_if(lambda c, experts: experts != (c is SHARED))
@pytest.mark.parametrize("how", [None, full("int8"), full("int4")])
@pytest.mark.parametrize("c", [SHARED, BIASED], ids=["shared", "biased"])
@pytest.mark.parametrize("experts", [True, False], ids=["whole", "parts"])
def test_experts_stay_where_they_are(c: Experts, how: Any, experts: bool):
    """One all-reduce adds up what devices make of their own; nothing else goes between them."""
    D, mesh = 64, mesh_of(tensor=2)
    specs = jax.tree.map(lambda s: replace(s, scale=0.3), experts_spec(c, D, 4), is_leaf=is_spec)
    w: Any = weights.drawn(specs)
    if how:
        w = replace(
            w, experts=compress({"layers": {"ffn": w.experts}}, projection_plan(how))["layers"]["ffn"]
        )
    placed = convert_to_device_forms(
        place_params(make_shardings(experts_spec(c, D, 4), mesh, make_axis_rules(mesh, experts)), w)
    )
    x = jax.device_put(np.random.default_rng(1).standard_normal((16, 1, D), np.float32))
    expected = np.asarray(jax.jit(partial(run_moe, c=c))(w, x=x))
    everywhere = jax.device_put(x, NamedSharding(mesh, PartitionSpec()))
    program = jax.jit(partial(run_moe, c=c)).lower(placed, x=everywhere).compile()
    found = np.asarray(jax.block_until_ready(program(placed, x=everywhere)))
    np.testing.assert_allclose(found, expected, atol=2e-6 * np.abs(expected).max())
    assert moved(program) == {"all-reduce": 1}


def moved(program: jax.stages.Compiled) -> Counter[str]:
    """Instructions between devices, by kind."""
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    return Counter(re.findall(rf"= .*? ({kinds})(?:-start)?\(", program.as_text() or ""))


def logits_over(mesh: Mesh, x: np.ndarray) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "tensor")))


@pytest.mark.parametrize("V", [2, 14, 254, 1000])
def test_the_likeliest_token_is_found_in_parts(V: int):
    """The first of equal ones too, wherever they lie."""
    x = np.random.default_rng(0).integers(0, 5, (9, V)).astype(np.float32)
    x[0], x[1, : V // 2], x[2, V // 2 :] = 0, -np.inf, -np.inf
    found = jax.jit(argmax)(logits_over(mesh_of(tensor=2), x))
    np.testing.assert_array_equal(np.asarray(jax.block_until_ready(found)), x.argmax(-1))


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_draws_from_logits_in_parts_are_those_of_one_device(mode: str):
    """All logits go between the devices once for the draw and once for the scores, never for an argmax."""
    B, V = 4, 300
    state = empty_sampling_state(B, V, logprobs_mode=mode)
    for slot, (temperature, top_p) in enumerate(((0.0, 1.0), (1.0, 0.9), (0.7, 0.5), (1.3, 1.0))):
        params = SamplingParams(temperature=temperature, top_p=top_p, top_k=40, logprobs=2)
        row = request_knobs(params, seed=slot, stop_ids=(), prompt_len=3)
        state = load_knobs(state, jnp.int32(slot), row)
    x = np.asarray(jax.random.normal(jax.random.key(0), (B, V)), np.float32) * 4
    slots, live = jnp.arange(B, dtype=jnp.int32), jnp.ones(B, bool)
    expected = jax.jit(sample)(jnp.asarray(x), slots + 3, slots, live, state)
    mesh = mesh_of(tensor=2)
    whole = NamedSharding(mesh, PartitionSpec())
    rest = jax.device_put((slots + 3, slots, live, state), whole)
    program = jax.jit(sample).lower(logits_over(mesh, x), *rest).compile()
    found = jax.block_until_ready(program(logits_over(mesh, x), *rest))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    sizes = re.findall(r"= .*?f32\[4,300\]\S* all-gather\(", program.as_text() or "")
    assert len(sizes) == 2 and moved(program) == {"all-gather": 3}


@pytest.mark.parametrize("rate", [False, True])
def test_devices_step_the_memories_of_their_heads(rate: bool):
    """In place, by the GPU's kernel, interpreted."""
    draw, mesh = np.random.default_rng(0), mesh_of(tensor=2)
    by_head = NamedSharding(mesh, PartitionSpec("tensor"))
    heads, whole = NamedSharding(mesh, PartitionSpec(None, "tensor")), NamedSharding(mesh, PartitionSpec())
    q, k, v = (draw.standard_normal((2, 4, 16)).astype(np.float32) for _ in range(3))
    terms = Terms(q, k, v, draw.random((2, 4), np.float32), draw.random((2, 4), np.float32) if rate else None)
    pool = draw.standard_normal((4, 3, 16, 16)).astype(np.float32)
    pages = StatePages(np.array([0, -1], np.int32), np.array([2, 1], np.int32))
    step = jax.jit(partial(step_pages, interpret=True))
    split = jax.device_put((pool, pages, terms), (by_head, whole, heads))
    program = step.lower(*split).compile()
    (found, out), expected = program(*split), step(pool, pages, terms)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), (found, out), expected)
    assert sharded_axes(found, 0) == sharded_axes(out, 1) == ("tensor",) and not moved(program)


def test_weights_in_shards_are_examined_on_their_devices():
    """By the library's own programs, in place of which most tests have numpy."""
    whole = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    sharding = NamedSharding(jax.make_mesh((2,), ("x",), devices=jax.devices()[:2]), PartitionSpec("x"))
    own = jax.device_put(whole, sharding)
    np.testing.assert_array_equal(quick.ON_DEVICES["digest"](own), quick.digest(whole))
    assert quick.ON_DEVICES["all_finite"](own)
    whole[-1, -1] = np.nan
    assert not quick.ON_DEVICES["all_finite"](jax.device_put(whole, sharding))
