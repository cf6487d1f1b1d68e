"""Parameters that are sharded over two devices give the tokens of one."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.adapters import merged, read, write
from fakes.tiers import always_fetching
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from suite.marks import full

from duetto import LLM, SamplingParams
from duetto.checkpoints import huggingface, orbax
from duetto.kvcache.pages import page_bytes
from duetto.kvcache.shardings import cache_shardings, min_pool_parts
from duetto.lora.request import LoRARequest
from duetto.model.attention import causal
from duetto.model.config import Latent, ModelConfig
from duetto.model.draft_pair import PairConfig
from duetto.model.sharding import device_bytes, fit_sharding, make_shardings
from duetto.model.transformer import compute_logits, decoder_spec, forward
from duetto.model.tree import is_spec, leaves_by_path, tree_bytes
from duetto.model.weights.compression.compress import quantize_params
from duetto.model.weights.compression.lowrank import LowRank
from duetto.model.weights.lora import lora_stacks
from duetto.model.weights.quant import Quantised
from duetto.serve.cli.bench import Bench
from duetto.serve.cli.bench import BenchModel as Measured
from duetto.serve.cli.convert import convert_model
from duetto.serve.engine.weights.weight_update import match_served_params
from duetto.serve.options.engine import EngineOptions
from duetto.serve.runtime.compiled.lowering import make_abstract_arguments
from duetto.serve.runtime.compiled.shapes import Shape
from duetto.serve.runtime.compiled.sizing import choose_sizes, max_scratch_bytes
from duetto.serve.runtime.steps.step import empty_slots

SMALL = {  # a cache of one request's length for two that run: the first two preempt each other
    "max_model_len": 160, "max_batched_token_mem": 160, "max_num_seqs": 2, "max_prefill_tokens": 64,
    "page_size": 16, "reproducible": False,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPTS = [[(k * i * i + i) % 300 for i in range(n)] for k, n in enumerate((62, 60, 110, 3))]


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    assert jax.device_count() == 2
    return Mesh(np.array(jax.devices()), ("tensor",))


def spread(model, mesh: Mesh):
    return jax.device_put(model.params, make_shardings(decoder_spec(model.config), mesh))


def pointers(tree) -> list[int]:
    return [part.data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) for part in x.addressable_shards]


def generated(llm: LLM, prompts=PROMPTS, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="session")
def alone(oracle):
    """What a model says to PROMPTS on one device, without a cache."""
    found: dict[str, list[list[int]]] = {}

    def answers(model) -> list[list[int]]:
        if model.name not in found:
            found[model.name] = [oracle(model)(prompt, GREEDY) for prompt in PROMPTS]
        return found[model.name]

    return answers


@pytest.mark.usefixtures("greedy_only")
@pytest.mark.parametrize(
    "model",
    [
        "tiny",
        full("windows"),
        full("latent"),
        full("recurrent"),
        full("windows, int8 cache"),
        full("latent, fp8_e5m2 cache"),
    ],
    indirect=True,
)
def test_split_parameters_are_served_in_place(model, mesh, alone):
    params = spread(model, mesh)
    before, expected = pointers(params), alone(model)
    with LLM.from_params(model.config, params, **SMALL, kv_cache_dtype=model.kv_cache_dtype) as llm:
        assert generated(llm) == expected
        report, one_table = llm.report(), len(model.config.windows) == 1
        assert report["compilations"] == 0 and (report["preemptions"] > 0 or not one_table)
        assert pointers(llm.params) == before == pointers(params)
        state = llm.engine._arguments
        for kind, *pools in zip(model.config.layers, state.cache.k, state.cache.states, strict=True):
            pool = next(own for own in pools if own is not None)
            # a latent row is no head, and three heads of a state lie whole on each
            ways = 1 if isinstance(kind.mixer, Latent) or kind.mixer.key_heads % 2 else 2
            assert device_bytes(pool) * ways == tree_bytes(pool)
            assert all(len(own.sharding.device_set) == 2 for own in jax.tree.leaves(pool))
        assert all(x.is_fully_replicated for x in jax.tree.leaves(state.slots))


@pytest.mark.usefixtures("greedy_only")
def test_the_reproducibility_contract_holds_on_a_mesh(tiny, mesh, alone):
    expected = alone(tiny)
    with LLM.from_params(tiny.config, spread(tiny, mesh), **SMALL | {"reproducible": True}) as llm:
        assert generated(llm) == expected == [generated(llm, [prompt])[0] for prompt in PROMPTS]
        assert llm.report()["compilations"] == 0


@pytest.mark.usefixtures("greedy_only")
def test_restored_pages_return_to_the_devices_of_their_heads(tiny, mesh, alone, tmp_path):
    expected = alone(tiny)
    with always_fetching(LLM.from_params(tiny.config, spread(tiny, mesh), **SMALL, swap_space=1)) as llm:
        for _ in range(2):
            assert generated(llm) == expected
        assert llm.report()["tiers"]["fetched"] > 0 and llm.report()["compilations"] == 0
        for pool in llm.engine.cache.k:
            assert device_bytes(pool) * 2 == tree_bytes(pool)
        llm.save_cache(tmp_path)
        llm.reset_prefix_cache(reset_connector=True)
        llm.load_cache(tmp_path)
        assert generated(llm) == expected and llm.report()["tiers"]["snapshot"]["hits"] > 0


@pytest.mark.usefixtures("few_shapes", "greedy_only")
def test_a_mesh_with_explicit_axes_is_one_too(tiny, alone):
    """`jax.make_mesh` types its axes so; arrays in it would refuse the steps' products."""
    params = spread(tiny, jax.make_mesh((2,), ("tensor",), (jax.sharding.AxisType.Explicit,)))
    before = pointers(params)
    with LLM.from_params(tiny.config, params, **SMALL) as llm:
        assert generated(llm) == alone(tiny)
        assert pointers(llm.params) == before


def test_the_cache_follows_the_axes_of_the_keys(tiny):
    """Of a mesh with two named axes, whatever their names are."""
    mesh = Mesh(np.array(jax.devices()).reshape(1, 2), ("rows", "columns"))
    rules = {"kv_heads": "columns", "heads": "columns", "model": "rows"}
    params = jax.device_put(tiny.params, make_shardings(decoder_spec(tiny.config), mesh, rules))
    pools: Any = cache_shardings(tiny.config.layers, params)
    assert {pool.spec for pool in (*pools.k, *pools.v)} == {PartitionSpec("columns")}
    assert min_pool_parts(tiny.config.layers, params) == 2
    keys = {
        path: x for path, x in leaves_by_path(params).items() if path.endswith(("attention.k", "attention.v"))
    }
    whole = NamedSharding(mesh, PartitionSpec())
    layers = [
        replace(layer, attention=replace(layer.attention, k=jax.device_put(layer.attention.k, whole)))
        for layer in params.layers
    ]
    assert len(keys) == 2 * tiny.config.num_layers
    assert min_pool_parts(tiny.config.layers, replace(params, layers=tuple(layers))) == 1


def test_each_device_is_filled(tiny, mesh):
    """With its part of the weights and of the cache, and whole slots, those of a warm-up, and temporaries."""
    config, options = tiny.config, EngineOptions()
    slots = tree_bytes(jax.eval_shape(lambda: empty_slots(options.num_slots, config.vocab_size)))
    beside = 2 * slots + max_scratch_bytes(PairConfig(config), options, jnp.float32)
    memory = int((beside + tree_bytes(tiny.params) + (1 << 20)) / options.gpu_memory_utilization) + 1
    (page,) = page_bytes(config.layers, options.page_size, jnp.float32)
    pages = []
    for params, ways in ((tiny.params, 1), (spread(tiny, mesh), 2)):
        sizes = choose_sizes(PairConfig(config), options, params, memory)
        held = make_abstract_arguments(PairConfig(config), params, sizes)
        left = int(memory * options.gpu_memory_utilization) - beside - device_bytes((held.params, held.cache))
        assert 0 <= left < page // ways and device_bytes(held.slots) == slots
        pages += sizes.pages
    assert 2 * pages[0] < pages[1] < 4 * pages[0]


def other(tiny):
    """The numbers of each weight in another order."""
    shuffled = np.random.default_rng(7).permutation
    params = jax.tree.map(lambda x: jax.device_put(shuffled(np.ravel(x)).reshape(x.shape)), tiny.params)
    return replace(tiny, name="other", params=params)


@pytest.mark.usefixtures("greedy_only")
def test_new_parameters_are_served_in_place(tiny, mesh, alone):
    new = other(tiny)
    params = spread(new, mesh)
    before, expected = pointers(params), alone(new)
    with LLM.from_params(tiny.config, spread(tiny, mesh), **SMALL) as llm:
        first = generated(llm)
        with pytest.raises(
            ValueError, match="update_params: embed lies in SingleDeviceSharding.*expected NamedSharding"
        ):
            llm.update_params(new.params)
        compiled = llm.report()["compilations"]  # parameters that lie elsewhere are looked at too
        llm.update_params(params)
        assert first != generated(llm) == expected
        assert pointers(llm.params) == before and llm.report()["compilations"] == compiled


@pytest.mark.usefixtures("greedy_only")
@pytest.mark.parametrize("step", [1, -1], ids=["same order", "other order"])
def test_a_trainers_shards_are_laid_out_on_the_devices(tiny, mesh, alone, monkeypatch, step):
    """Masters in another dtype, split along the model's width as a trainer splits them."""
    trainers = Mesh(np.array(jax.devices())[::step], ("fsdp",))
    split = make_shardings(decoder_spec(tiny.config), trainers, {"model": "fsdp"})
    rounded = replace(
        tiny,
        name="rounded",
        params=jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), tiny.params),
    )
    masters = jax.device_put(jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.params), split)
    expected = alone(rounded)

    with LLM.from_params(tiny.config, spread(other(tiny), mesh), **SMALL) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(
                type(masters.embed), "_value", property(lambda _: pytest.fail("copied to the host"))
            )
            assert match_served_params(llm.engine.params, masters, copy=False)[1]
        llm.update_params(masters)
        assert generated(llm) == expected
        jax.tree.map(lambda x: x.delete(), masters)
        assert generated(llm) == expected


@pytest.mark.usefixtures("greedy_only")
def test_a_failed_step_does_not_change_the_tokens(tiny, mesh, alone, monkeypatch):
    expected = alone(tiny)
    with LLM.from_params(tiny.config, spread(tiny, mesh), **SMALL) as llm:
        run, calls = llm.engine.executor.run, []

        def broken(*arguments):
            result = run(*arguments)
            calls.append(1)
            if len(calls) == 3:
                raise jax.errors.JaxRuntimeError("INTERNAL: failed")
            return result

        monkeypatch.setattr(llm.engine.executor, "run", broken)
        assert generated(llm) == expected and len(calls) > 3
        assert llm.report()["compilations"] == 0


@pytest.mark.full
@pytest.mark.usefixtures("greedy_only")
@pytest.mark.parametrize("how, record", [("int4", Quantised), (0.9, LowRank)])
def test_compressed_weights_are_split_too(tiny, mesh, oracle, how, record):
    small = replace(tiny, params=quantize_params(tiny.params, how))
    assert isinstance(small.params.layers[0].attention.k, record)
    where = leaves_by_path(make_shardings(decoder_spec(tiny.config), mesh))
    placed = jax.tree_util.tree_map_with_path(
        lambda key, x: jax.device_put(x, fit_sharding(own(where, key), x.shape)), small.params
    )
    assert min_pool_parts(tiny.config.layers, placed) == 2
    with LLM.from_params(tiny.config, placed, **SMALL) as llm:
        assert generated(llm, PROMPTS[:1]) == [oracle(small)(PROMPTS[0], GREEDY)]


def own(where, key):
    """The sharding of the parameter that an array stands for."""
    path = jax.tree_util.keystr(key, simple=True, separator=".")
    return where.get(path) or where[path.rpartition(".")[0]]


@pytest.mark.full
@pytest.mark.usefixtures("greedy_only")
def test_a_sharded_training_loop_samples(tiny, oracle):
    """Every parameter is split along the model's width, as in fully sharded data parallelism."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    placed = make_shardings(decoder_spec(tiny.config), mesh, {"model": "data"})
    rows = NamedSharding(mesh, PartitionSpec("data"))
    tokens = jax.device_put(np.random.default_rng(0).integers(0, 300, (4, 24), dtype=np.int32), rows)

    def loss(params):
        places = jnp.broadcast_to(jnp.arange(23, dtype=jnp.int32)[None], (4, 23))
        hidden, _ = forward(params, tiny.config, tokens[:, :-1], places, causal)
        scores = jax.nn.log_softmax(compute_logits(params, tiny.config, hidden))
        return -jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1).mean()

    @partial(jax.jit, out_shardings=(placed, None))
    def train(params):
        value, slopes = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.05 * g, params, slopes), value

    params, losses = jax.device_put(tiny.params, placed), []
    with LLM.from_params(tiny.config, params, **SMALL) as llm:
        for _ in range(2):
            for _ in range(4):
                params, value = jax.block_until_ready(train(params))
                losses.append(float(value))
            before = pointers(params)
            llm.update_params(params)
            gathered = replace(tiny, params=jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), params))
            assert generated(llm, PROMPTS[:1]) == [oracle(gathered)(PROMPTS[0], GREEDY)]
            assert pointers(llm.params) == before
    assert losses[-1] < losses[0]


@pytest.mark.usefixtures("few_shapes", "greedy_only")
def test_a_folder_is_loaded_onto_a_mesh(tiny, alone, oracle, tmp_path):
    mesh = jax.make_mesh((jax.device_count(),), ("tensor",))
    huggingface.save_hf(tmp_path / "theirs", tiny.config, tiny.params)
    convert_model(tmp_path / "theirs", tmp_path / "ours")
    convert_model(tmp_path / "theirs", tmp_path / "small", quantization="int8")
    for folder in ("theirs", "ours"):
        with LLM(tmp_path / folder, mesh=mesh, **SMALL) as llm:
            assert generated(llm) == alone(tiny)
            assert device_bytes(llm.params.embed) * 2 == tree_bytes(llm.params.embed)
    expected = oracle(replace(tiny, params=orbax.load_orbax(tmp_path / "small")[1]))(PROMPTS[0], GREEDY)
    for folder, how in (("small", None), ("theirs", "int8")):
        with LLM(tmp_path / folder, mesh=mesh, quantization=how, **SMALL) as llm:
            assert generated(llm, PROMPTS[:1]) == [expected]
            attention: Any = llm.params.layers[0].attention
            k = attention.k
            assert isinstance(k, Quantised) and device_bytes(k.values) * 2 == tree_bytes(k.values)
    with pytest.raises(ValueError, match="mesh has axes data, expected tensor among them"):
        LLM(tmp_path / "theirs", mesh=Mesh(mesh.devices, ("data",)), **SMALL)


@pytest.mark.full
@pytest.mark.usefixtures("greedy_only")
def test_adapters_are_split_as_their_weights_are(tiny, mesh, oracle, tmp_path):
    """And their rows have the tokens of merged weights on one device."""
    wanted = [
        LoRARequest(name, i, str(write(tmp_path / name, tiny.config, 2 + i, i)))
        for i, name in enumerate("ab", 1)
    ]
    plain = [replace(tiny, params=merged(tiny.params, read(tmp_path / x, tiny.config))) for x in "ab"]
    with LLM.from_params(tiny.config, spread(tiny, mesh), enable_lora=True, **SMALL) as llm:
        asked = [wanted[0], None, wanted[1], wanted[0]]  # in turn: there is one place
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=asked)
        stacks = lora_stacks(llm.engine._arguments.params)
    for model, i in ((plain[0], 0), (tiny, 1), (plain[1], 2), (plain[0], 3)):
        assert outputs[i].outputs[0].token_ids == oracle(model)(PROMPTS[i], GREEDY)
    assert stacks["layers.0.attention.o"][0].sharding.spec[0] == "tensor"
    assert stacks["layers.0.ffn.up"][1].sharding.spec[2] == "tensor"


def test_heads_that_do_not_divide_are_refused(mesh, tmp_path):
    config = ModelConfig.uniform(50, 24, 48, 1, 6, 3, 8, 64)
    zeros = partial(jax.tree.map, lambda spec: np.zeros(spec.shape, np.float32), is_leaf=is_spec)
    huggingface.save_hf(tmp_path, config, zeros(decoder_spec(config)))
    with pytest.raises(ValueError, match="3 kv_heads cannot be split over 2 devices: choose a divisor of 3"):
        LLM(tmp_path, mesh=mesh)


def test_parameters_on_different_devices_are_refused(tiny, mesh):
    params = replace(spread(tiny, mesh), head=tiny.params.head)
    with pytest.raises(ValueError, match=r"head lies on \S+, embed on \S+ and \S+: all must"):
        LLM.from_params(tiny.config, params, **SMALL)


def test_a_mesh_can_be_measured(tiny, mesh):
    measured = Measured("tiny", tiny.config, spread(tiny, mesh), EngineOptions(page_size=16))
    bench = Bench(measured, Shape("decode", 8, 1), 16)
    for _ in range(2):
        assert (np.asarray(bench.step().sampled.token) >= 0).all()
