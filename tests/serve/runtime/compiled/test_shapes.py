"""The table of shapes, and what is chosen about the load, follow the device."""

from dataclasses import replace
from itertools import product
from typing import Any

import jax.numpy as jnp
import pytest

from duetto.cpu_kernels.library import KernelLibrary
from duetto.kvcache.pages import page_bytes
from duetto.model.config import ModelConfig
from duetto.model.draft_pair import PairConfig
from duetto.model.weights import device_forms
from duetto.serve.host.devices import MEMORY_FRACTION
from duetto.serve.options.checks import round_up
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.engine_plan import abstract_params
from duetto.serve.planner.roofline.targets import local_target
from duetto.serve.runtime.compiled.shapes import (
    CanonicalShapes,
    Sizes,
    engine_shapes,
    resolve_cpu_options,
    shape_table,
    shared_prefill_row_tokens,
    single_prompt_shape,
)
from duetto.serve.runtime.compiled.sizing import choose_sizes, pages_by_window

GIB = 1 << 30


def shapes(platform: str, **options: object) -> dict[str, list[tuple[int, int]]]:
    chosen = EngineOptions(**options)
    found = shape_table(chosen, Sizes(4096, chosen.num_slots, (64,), 64), can_share=True, platform=platform)
    phases = ("prefill", "decode", "verify")
    return {phase: [(s.rows, s.tokens) for s in found if s.phase == phase] for phase in phases}


def test_cpu_shapes_are_narrow_and_accelerator_shapes_are_wide():
    load = {"max_num_seqs": 256, "max_prefill_tokens": 2048}
    cpu, gpu = shapes("cpu", **load), shapes("gpu", **load)
    assert cpu["decode"][0] == (8, 1) and cpu["prefill"][0] == (1, 64)
    assert gpu["decode"] == [(64, 1), (128, 1), (256, 1)]
    assert gpu["prefill"] == [(1, 512), (1, 1024), (1, 2048), (32, 32), (64, 32)]


def test_without_the_contract_an_accelerator_has_narrow_ones_too():
    load = {"max_num_seqs": 64, "max_prefill_tokens": 512, "reproducible": False}
    found, cpu = shapes("gpu", **load), shapes("cpu", **load)
    assert found == cpu | {"prefill": [s for s in cpu["prefill"] if s not in ((2, 32), (4, 32))]}
    assert found["decode"][0] == (1, 1) and found["prefill"][0] == (1, 64)


def test_batch_invariant_matmul_gives_accelerators_the_shapes_of_cpus():
    load = {"max_num_seqs": 64, "max_prefill_tokens": 512}
    cpu = shapes("cpu", **load)
    wide = {"prefill": [s for s in cpu["prefill"] if s not in ((2, 32), (4, 32))]}
    assert shapes("gpu", **load, batch_invariant_matmul=True) == cpu | wide
    assert shapes("cpu", **load, batch_invariant_matmul=True) == shapes("cpu", **load)


def test_shapes_are_narrow_where_kernels_of_a_cpu_were_packed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_forms, "load_library", lambda: KernelLibrary(("avx2",)))
    config = ModelConfig.uniform(256, 64, 128, 2, 4, 2, 16, 512)

    def narrowest(dtype: Any) -> int:
        options = EngineOptions(max_num_seqs=8, cpu_kernels=True)
        params = device_forms.convert_to_device_forms(
            abstract_params(config, dtype, local_target()), device_forms.DeviceForms(cpu_kernels=True)
        )
        found = shape_table(resolve_cpu_options(options, params), Sizes(512, 8, (64,), 64), True, "cpu")
        return min(shape.rows for shape in found if shape.phase == "decode")

    assert [narrowest(dtype) for dtype in (jnp.bfloat16, jnp.float32, jnp.float16)] == [1, 1, 8]


def test_cpu_kernels_run_several_steps_of_small_models(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_forms, "load_library", lambda: KernelLibrary(("avx2",)))

    def several(layers: int, **options: Any) -> set[tuple[int, int]]:
        config = ModelConfig.uniform(256, 2048, 8192, layers, 16, 4, 128, 512)
        chosen = EngineOptions(max_num_seqs=8, cpu_kernels=True, **options)
        params = device_forms.convert_to_device_forms(
            abstract_params(config, jnp.bfloat16, local_target()), device_forms.DeviceForms(cpu_kernels=True)
        )
        found = shape_table(resolve_cpu_options(chosen, params), Sizes(512, 8, (64,), 64), True, "cpu")
        return {(s.rows, s.tokens) for s in found if s.phase == "decode" and s.tokens > 1}

    assert several(8) == {(1, 4), (2, 4), (4, 4)}
    assert several(9) == several(8, decode_steps=1) == set()  # above 1 GiB
    assert several(8, speculative_config={"method": "ngram"}) == several(8, hidden_state_layers=(0,)) == set()
    assert several(9, decode_steps=3) == {(1, 3), (2, 3), (4, 3), (8, 3)}


def test_prompts_share_short_rows_where_cpu_kernels_read_all_keys():
    config = ModelConfig.uniform(256, 64, 128, 2, 4, 2, 16, 512)
    options = EngineOptions(max_num_seqs=8, max_prefill_tokens=128, cpu_kernels=True)

    def row(options: EngineOptions, kv_cache_dtype: str) -> int:
        return shared_prefill_row_tokens(options, config.layers, kv_cache_dtype, jnp.float32)

    assert row(options, "int8") == row(replace(options, cpu_kernels=False), "auto") == 32
    found = shape_table(options, Sizes(512, 8, (64,), 64), True, "cpu", row(options, "auto"))
    prefills = [(s.rows, s.tokens) for s in found if s.phase == "prefill"]
    alone = [(1, 16), (1, 32), (1, 64), (1, 128)]
    assert prefills == [*alone, (16, 2), (24, 2), (32, 2), (48, 2), (64, 2)]
    lengths = 10, 30, 33, 48, 49, 96, 97, 128, 500  # of a prompt that is alone: rows where they pad it least
    kept = [(1, 16), (1, 32), (24, 2), (24, 2), (1, 64), (48, 2), (1, 128), (1, 128), (1, 128)]
    one = [single_prompt_shape(tuple(s for s in found if s.phase == "prefill"), n) for n in lengths]
    assert [(s.rows, s.tokens) for s in one] == kept
    found = shape_table(options, Sizes(512, 8, (64,), 64), True, "cpu", row(options, "int8"))
    prefills = [(s.rows, s.tokens) for s in found if s.phase == "prefill"]
    assert prefills == [(1, 16), (1, 32), (1, 64), (1, 128), (2, 32), (4, 32)]


@pytest.mark.parametrize(
    ("head", "reproducible", "narrowest"), [(16, True, 1), (12, True, 8), (12, False, 1)]
)
def test_decodes_are_narrow_where_cpu_kernels_read_all_keys(head, reproducible, narrowest):
    layers = ModelConfig.uniform(256, 64, 128, 2, 4, 2, head, 512).layers
    options = EngineOptions(max_num_seqs=8, cpu_kernels=True, reproducible=reproducible)
    found = engine_shapes(options, Sizes(512, 8, (64,), 64), layers, "cpu", jnp.float32)
    assert min(shape.rows for shape in found if shape.phase == "decode") == narrowest


def test_verifications_have_the_widths_of_decodes():
    guesses = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 7}}
    options = EngineOptions(max_num_seqs=64, **guesses)
    found = [
        shape
        for shape in shape_table(options, Sizes(4096, 64, (64,), 64), can_share=True, platform="gpu")
        if shape.phase == "verify"
    ]
    assert [shape.area for shape in found] == [64, 128, 256]
    assert all((shape.rows, shape.tokens) == (64, 8) for shape in found)


def test_draft_models_have_verifications_of_few_rows_too():
    config = {"method": "draft_model", "model": "x", "num_speculative_tokens": 3}
    options = EngineOptions(max_num_seqs=8, speculative_config=config)
    found = shape_table(options, Sizes(4096, 8, (64,), 64), can_share=True, platform="cpu")
    verify = [(s.rows, s.packed_tokens) for s in found if s.phase == "verify"]
    assert verify == [(1, 8), (2, 16), (4, 32), (8, 8), (8, 16), (8, 32)]


@pytest.mark.parametrize("seats, prefill", [(1, 16), (8, 64), (40, 300), (64, 512), (256, 8192)])
def test_canonical_shapes_are_in_the_table(seats: int, prefill: int):
    options = EngineOptions(max_num_seqs=seats, max_prefill_tokens=prefill)
    sizes = Sizes(4096, seats, (64,), 64)
    buckets = tuple(sorted({64, round_up(prefill, 64)}))
    others = replace(options, prefill_buckets=buckets), replace(options, batch_invariant_matmul=True)
    both = replace(options, prefill_buckets=buckets, batch_invariant_matmul=True)
    for platform, chosen in product(("cpu", "gpu", "tpu"), (options, *others, both)):
        canonical = CanonicalShapes.choose(platform, chosen, sizes)
        assert set(canonical) <= set(shape_table(chosen, sizes, True, platform))
        assert canonical.decode_shape.tokens == canonical.prefill_shape.rows == 1


def test_requested_buckets_stay_beside_the_canonical_one():
    found = shapes("gpu", max_prefill_tokens=1024, prefill_buckets=(64, 768, 1024))["prefill"]
    assert [tokens for rows, tokens in found if rows == 1] == [64, 512, 768, 1024]


@pytest.mark.parametrize(
    "memory, seats, tokens",
    [
        (None, 32, 512), (0, 64, 512), (25 * GIB - 1, 64, 512), (25 * GIB, 128, 1024),
        (50 * GIB - 1, 128, 1024), (50 * GIB, 256, 2048), (75 * GIB, 256, 2048),
    ],
)  # fmt: skip
def test_the_load_follows_the_memory_unless_it_is_chosen(memory: int | None, seats: int, tokens: int):
    found = EngineOptions().with_device_load(memory)
    assert (found.max_num_seqs, found.max_prefill_tokens) == (seats, tokens)
    mine = EngineOptions(max_num_seqs=3, prefill_buckets=(64, 192)).with_device_load(memory)
    assert (mine.max_num_seqs, mine.max_prefill_tokens) == (3, 192)


def test_eighty_gib_hold_fifty_of_keys_beside_an_8b_model():
    """Qwen3-8B in bfloat16, with what is chosen for such a card."""
    config = ModelConfig.uniform(151936, 4096, 12288, 36, 32, 8, 128, 40960)
    memory = int(85_000_000_000 * MEMORY_FRACTION)
    options = EngineOptions().with_device_load(memory)
    sizes = choose_sizes(
        PairConfig(config), options, abstract_params(config, jnp.bfloat16, local_target()), memory
    )
    (pages,) = pages_by_window(
        config.layers, options, sizes.max_model_len, sizes.pages[0], sizes.state_stride
    )
    (page,) = page_bytes(config.layers, sizes.page_size, jnp.bfloat16)
    assert sizes.max_num_seqs == 256 and pages * page >= 50 * GIB


def test_a_cache_in_eight_bits_holds_twice_the_tokens():
    """Where the memory says how many there are, but for the scales: one of 16 bits for 128 numbers."""
    config = ModelConfig.uniform(151936, 4096, 12288, 36, 32, 8, 128, 40960)
    params = abstract_params(config, jnp.bfloat16, local_target())

    def tokens(kv_cache_dtype: str) -> int:
        options = EngineOptions(kv_cache_dtype=kv_cache_dtype, max_num_seqs=64)
        sizes = choose_sizes(PairConfig(config), options, params, 30 * GIB)
        assert sizes.kv_cache_dtype == kv_cache_dtype
        return sizes.pages[0] * sizes.page_size

    for name in ("int8", "fp8_e4m3", "fp8_e5m2"):
        assert tokens(name) / tokens("auto") == pytest.approx(2 * 128 / 130, rel=0.01)
