"""What goes between devices in programs that are compiled for accelerators which are not there."""

import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from cases.targets import LAYERS, compile_for, found_target, job_for
from fakes.greedy import greedy_programs

from duetto.kvcache.shardings import min_pool_parts
from duetto.model.config import Experts
from duetto.model.draft_pair import target_params
from duetto.model.experts import MoE
from duetto.model.sharding import device_bytes
from duetto.model.tree import tree_bytes
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.engine_plan import EnginePlan, abstract_arguments
from duetto.serve.planner.roofline.presets import PRESETS
from duetto.serve.runtime.compiled.shapes import Shape

pytestmark = pytest.mark.extras
KINDS = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|ragged-all-to-all"
ROWS = 64
REDUCED, GATHERED, EXCHANGED = "all-reduce", "all-gather", "all-to-all"


def plan_for(target: str, model: str, **options: Any) -> EnginePlan:
    plan = job_for(found_target(target), model)
    asked = EngineOptions(**options)
    if model == "deepseek-v3":  # a dense layer, and one of experts
        kinds = PRESETS[model].layers
        plan = replace(plan, config=replace(plan.config, layers=(kinds[0], kinds[-1])))
    sizes = replace(plan.sizes, shards=asked.data_parallel_size)
    return replace(plan, options=asked, sizes=sizes)


def between(text: str) -> Counter[tuple[str, str]]:
    """Instructions between devices with the numbers that they give, the last of an asynchronous one's; of one
    that does the work of several, each."""
    found: Counter[tuple[str, str]] = Counter()
    for kind, name in re.findall(rf"= (\(*[a-z].*?) ({KINDS})(?:-start)?\(", text):
        sizes = [
            (dtype, [int(n) for n in dims.split(",") if n])
            for dtype, dims in re.findall(r"([a-z]+\d+)\[([\d,]*)\]", kind)
        ]
        given = sizes[len(sizes) // 2 :] if kind.startswith("((") else sizes[-1:]
        found.update((name, f"{dtype}[{','.join(str(n) for n in dims if n > 1)}]") for dtype, dims in given)
    return found


@pytest.mark.parametrize(
    "target, model, options",
    [
        ("8xh200", "8b", {}),
        ("8xh200", "8b", {"quantization": "int8"}),
        ("8xh200", "0.6b", {}),
        ("8xh200", "30b-a3b", {}),
        ("8xh200", "30b-a3b", {"enable_expert_parallel": True}),
        ("8xh200", "deepseek-v3", {"enable_expert_parallel": True}),
        ("8xh200", "gpt-oss-20b", {"enable_expert_parallel": True}),
        ("v6e:2x4", "8b", {}),
        ("v6e:2x4", "30b-a3b", {"enable_expert_parallel": True}),
    ],
    ids=str,
)
def test_a_step_reduces_twice_per_layer_and_moves_no_weight(target: str, model: str, options: dict[str, Any]):
    """In the model's dtype, and once for the embedding. Draws gather logits once, scores too: of one program
    of each target."""
    plan = plan_for(target, model, **options)
    arguments, draws = abstract_arguments(plan), model == "8b" and not options
    with nullcontext() if draws else greedy_programs():
        found = between(compile_for(plan, Shape("decode", ROWS, 1), arguments).as_text() or "")
    D, V, n = plan.config.hidden_size, plan.config.vocab_size, len(plan.target.devices)
    hidden, logits, best = f"bf16[{ROWS},{D}]", f"f32[{ROWS},{V}]", f"s32[{n},2,{ROWS}]"
    drawn = {(GATHERED, logits): 2} if draws else {}
    assert found == {(REDUCED, hidden): 2 * LAYERS + 1, (GATHERED, best): 1} | drawn


@pytest.mark.parametrize("target, model", [("v6e:2x2", "qwen3.5-4b"), ("8xh200", "qwen3-next-80b")], ids=str)
def test_a_prompt_writes_states_where_they_are(target: str, model: str):
    """After each block of tokens; each device has the states of its own heads."""
    plan = plan_for(target, model)
    with greedy_programs():
        text = compile_for(plan, Shape("prefill", 1, 256), abstract_arguments(plan)).as_text() or ""
    found, layers = between(text), len(plan.config.layers)
    assert found[REDUCED, f"bf16[256,{plan.config.hidden_size}]"] == 2 * layers + 1
    assert not [made for kind, made in found if kind == GATHERED and made.startswith("f32")]


@pytest.mark.parametrize(
    "model, shards, tensor, quantization",
    [
        ("deepseek-v3", 8, 1, "fp8"),
        ("deepseek-v3", 2, 4, None),
        ("deepseek-v3", 2, 4, "fp8"),
        ("30b-a3b", 2, 4, None),
    ],
)
def test_shards_exchange_tokens_of_experts_and_nothing_else(
    model: str, shards: int, tensor: int, quantization: Any
):
    """In the model's dtype. Within a group of several devices there is what there is without shards, but for
    products of codes beside the experts', which are added up as float32."""
    options = {"data_parallel_size": shards, "tensor_parallel_size": tensor, "quantization": quantization}
    plan = plan_for("8xh200", model, enable_expert_parallel=True, **options)
    draws = model == "30b-a3b"
    with nullcontext() if draws else greedy_programs():
        found = between(compile_for(plan, Shape("decode", ROWS, 1), abstract_arguments(plan)).as_text() or "")
    mixtures = [kind.ffn for kind in plan.config.layers if isinstance(kind.ffn, Experts)]
    D, V, A, layers = plan.config.hidden_size, plan.config.vocab_size, mixtures[0].active, len(mixtures)
    apart = {
        (GATHERED, f"bf16[{shards * ROWS},{D}]"): layers,
        (GATHERED, f"s32[{shards * ROWS},{2 * A}]"): layers,
        (EXCHANGED, f"bf16[{shards},{ROWS},{D}]"): layers,
    }
    codes = 2 * LAYERS - layers if quantization else 0
    within = {
        (REDUCED, f"bf16[{ROWS},{D}]"): 2 * LAYERS + 1 - codes,
        **({(REDUCED, f"f32[{ROWS},{D}]"): codes} if codes else {}),
        **({(GATHERED, f"f32[{ROWS},{V}]"): 2} if draws else {}),
        (GATHERED, f"s32[{tensor},2,{ROWS}]"): 1,
    }
    assert found == (apart | within if tensor > 1 else apart)


def test_devices_of_a_group_share_key_heads():
    """Four on eight devices: each keeps one, of which another keeps a copy."""
    plan = plan_for("8xh200", "30b-a3b")
    arguments = abstract_arguments(plan)
    mesh: Any = target_params(arguments.params).embed.sharding
    assert dict(mesh.mesh.shape) == {"kv": 4, "group": 2}
    assert device_bytes(arguments.cache) * 4 == tree_bytes(arguments.cache)
    assert min_pool_parts(plan.config.layers, arguments.params) == 4


@pytest.mark.parametrize("model, experts", [("30b-a3b", 128), ("deepseek-v3", 256)])
def test_every_device_has_an_eighth_of_the_experts(model: str, experts: int):
    plan = plan_for("8xh200", model, enable_expert_parallel=True)
    layer = target_params(abstract_arguments(plan).params).layers[-1].ffn
    assert isinstance(layer, MoE)
    up = layer.experts.up
    assert up.sharding.shard_shape(up.shape)[0] * 8 == experts == up.shape[0]
    assert up.sharding.shard_shape(up.shape)[1:] == up.shape[1:]
    assert layer.router.sharding.is_fully_replicated
