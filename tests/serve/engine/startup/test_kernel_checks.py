"""Kernels that fail or lie are refused at the start, which goes on with the reference."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from threading import Event, current_thread
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.gpus import traced_for, traced_for_tpu
from cases.weights import drawn
from fakes.greedy import greedy_programs
from jax.sharding import AbstractMesh
from suite.fixtures import ROOT
from suite.marks import full, full_if

from duetto import LLM, SamplingParams
from duetto.kvcache.kernels import attention
from duetto.kvcache.kernels.hopper_attention import HOPPER_PREFILL
from duetto.model.config import Dense, Experts, GroupedQuery, Latent, LayerKind, ModelConfig
from duetto.model.gpus import may_use_kernel
from duetto.model.recurrent.kinds import DeltaNet, Mamba
from duetto.model.sharding import make_axis_rules, make_shardings
from duetto.model.transformer import Decoder, decoder_spec
from duetto.model.weights import device_forms, grouped_matmul, nibbles
from duetto.model.weights.compression.compress import quantize_params
from duetto.model.weights.device_forms import DeviceForms, convert_to_device_forms
from duetto.model.weights.fixed_tiles import with_fixed_tiles
from duetto.model.weights.gpu.code_tiles import CODE_PRODUCT_KERNEL, ROW_CODES_KERNEL
from duetto.serve.engine.startup import kernel_cases as cases_of
from duetto.serve.engine.startup import kernel_checks, start
from duetto.serve.engine.startup.kernel_cases import kernel_cases
from duetto.serve.engine.startup.kernel_checks import (
    KernelCheck,
    check_kernel_case,
    check_kernels,
    failed_kernel_names,
    require_no_hang,
)
from duetto.serve.runtime.compiled import executable_cache
from duetto.serve.runtime.compiled.lowering import LocalLowering
from duetto.serve.runtime.compiled.shapes import Sizes
from duetto.serve.runtime.multihost import rendezvous

DRAFT = ROOT / "checkpoints" / "demo-draft"  # the smallest there is
D, DENSE = 128, Dense(192)
SIZES = Sizes(max_model_len=256, max_num_seqs=8, pages=(9,), page_size=16)
HEADS = GroupedQuery(4, 2, 32)
OPTIONS = {"max_num_seqs": 8, "max_model_len": 64, "max_prefill_tokens": 32, "background_compilation": False}
UNTURNED = replace(HEADS, rope=None)  # attention's kernels alone
MIXERS = {
    "heads": (HEADS, {"attention_decode", "attention_prefill", "turn_and_write"}),
    "heads with a window, a cap and sinks": (
        GroupedQuery(4, 2, 32, window=40, softcap=5.0, sinks=True),
        {"attention_decode", "attention_prefill", "turn_and_write"},
    ),
    "heads that Mosaic reads": (
        GroupedQuery(4, 2, 64, window=40, sinks=True),
        {"attention_decode", "attention_prefill", "attention_prefill_hopper", "turn_and_write"},
    ),
    "heads of no kernel": (GroupedQuery(4, 2, 8), set()),
    "latent": (Latent(4, 32, 16, 16, 16), {"latent_decode", "latent_prefill"}),
    "delta rule": (DeltaNet(2, 4, 16, 32), {"recurrent_step"}),
    "delta rule by dimension": (DeltaNet(2, 2, 16, 16, decay_rank=8), {"recurrent_step"}),
    "Mamba": (Mamba(1, 4, 16, 16), {"recurrent_step"}),
}
# Their checks are repetitions, as all in float32 are.
LIKE_OTHERS = "heads", "heads with a window, a cap and sinks", "delta rule by dimension"


def model(mixer: Any, ffn: Any = DENSE, dtype: str = "bfloat16") -> tuple[ModelConfig, Decoder]:
    config = ModelConfig(64, D, (LayerKind(mixer, ffn),) * 2, 256)
    return config, drawn(decoder_spec(config), jnp.dtype(dtype))


@pytest.fixture(autouse=True, scope="module")
def references_once() -> Iterator[None]:
    """Attention's reference is traced once for equal arrays, whose numbers are always the same."""

    attend, references = cases_of.attend_by_reference, dict[str, jax.Array]()

    def compute_once(q: Any, pages: Any, attention_params: Any) -> jax.Array:
        key = str((jax.tree.map(jax.typeof, (q, pages)), attention_params))
        if key not in references:
            references[key] = attend(q, pages, attention_params)
        return references[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases_of, "attend_by_reference", compute_once)
        yield


@pytest.fixture
def hopper() -> Iterator[None]:
    with traced_for("h200"):
        yield


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No program and no result is stored."""
    monkeypatch.setattr(executable_cache, "program_folder", lambda: None)


@full_if(lambda name, dtype: name in LIKE_OTHERS or dtype == "float32")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", MIXERS)
def test_the_kernels_of_each_mixer_pass(hopper: None, name: str, dtype: str):
    mixer, kernels = MIXERS[name]
    config, params = model(mixer, dtype=dtype)
    cases = list(kernel_cases(config, params, SIZES))
    of_16_bits = {"attention_prefill_hopper"} if dtype == "float32" else set()
    assert {case.kernel.name for case in cases} == kernels - of_16_bits
    for case in cases:
        if case.kernel == HOPPER_PREFILL:
            continue  # its interpreter is another
        found = check_kernel_case(case)
        assert found.reason == "" and found.was_tried, case.name
        assert found.difference is not None and found.difference < (5e-3 if dtype == "bfloat16" else 1e-5)


@pytest.mark.parametrize("kept", ["int8", full("fp8_e4m3")])
def test_kernels_of_8_bit_caches_are_checked(hopper: None, kept: str):
    sizes = Sizes(256, 8, (9,), 16, kv_cache_dtype=kept)
    every = [check_kernel_case(case) for case in kernel_cases(*model(HEADS), sizes)]
    assert len(every) == 2 and not any(check.reason for check in every)


def test_products_of_four_bits_are_checked(hopper: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nibbles, "multiply_nibbles", partial(nibbles.multiply_nibbles, interpret=True))
    config, params = model(HEADS)
    cases = list(kernel_cases(config, quantize_params(params, "int4"), SIZES))
    products = [case for case in cases if case.kernel.name == "int4_product"]
    assert products
    assert {check_kernel_case(case).reason for case in products} == {""}


def test_products_of_codes_are_checked(hopper: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_forms, "is_on_one_gpu", lambda params: True)
    config, params = model(HEADS)
    served = convert_to_device_forms(quantize_params(params, "int8"), DeviceForms(activations="int8"))
    cases = [case for case in kernel_cases(config, served, SIZES) if "int8" in case.kernel.name]
    assert {case.kernel for case in cases} == {ROW_CODES_KERNEL, CODE_PRODUCT_KERNEL}
    assert any("silu" in case.sizes for case in cases)
    for case in cases:
        found = check_kernel_case(case)
        assert found.reason == "" and found.difference is not None and found.difference < 0.01, case.name


@pytest.mark.parametrize(
    "form, sizes",
    [
        full(None, ["128x192, bfloat16", "192x128, bfloat16"]),
        full("int8", ["128x192, bfloat16, int8, 1x192 scales in float32",
                      "192x128, bfloat16, int8, 1x128 scales in float32"]),
        ("int4", ["128x192, bfloat16, int4, 4x192 scales in bfloat16",
                  "192x128, bfloat16, int4, 6x128 scales in bfloat16"]),
    ],
)  # fmt: skip
def test_products_of_experts_are_checked(hopper: None, form: Any, sizes: list[str]):
    config, params = model(HEADS, Experts(8, 2, 192))
    params = params if form is None else quantize_params(params, form)
    cases = [case for case in kernel_cases(config, params, SIZES) if case.kernel.name == "expert_tiles"]
    assert [case.name for case in cases] == [f"expert_tiles {size}" for size in sizes]
    for case in cases:
        found = check_kernel_case(case)
        assert found.reason == "" and found.difference is not None and found.difference < 5e-3


def test_experts_are_checked_in_the_sizes_of_a_device(hopper: None):
    """Half of each expert on one device, whole experts on another."""
    config, params = model(HEADS, Experts(8, 2, 256))
    mesh = AbstractMesh((2,), ("tensor",))
    for experts, sizes in ((False, ["128x128"]), (True, ["128x256", "256x128"])):
        where = make_shardings(decoder_spec(config), mesh, make_axis_rules(mesh, experts))
        shapes = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, where)
        names = [case.name for case in kernel_cases(config, shapes, SIZES)]
        assert [name for name in names if name.startswith("expert_tiles")] == [
            f"expert_tiles {size}, bfloat16" for size in sizes
        ]


def test_products_that_only_a_gpu_can_run_are_named(hopper: None, monkeypatch: pytest.MonkeyPatch):
    """Each tiling once, each pair of an expert's sizes by jax's kernel, which may stand in for ours."""
    monkeypatch.setattr(grouped_matmul, "ragged_dot_module", lambda: grouped_matmul)
    config, params = model(HEADS, Experts(8, 2, 192))
    names = [case.name for case in kernel_cases(config, with_fixed_tiles(params), SIZES)]
    assert [name for name in names if name.startswith("expert_product")] == [
        "expert_product 128x192, bfloat16",
        "expert_product 192x128, bfloat16",
    ]
    tilings = [name for name in names if name.startswith("fixed")]
    assert tilings and len(set(tilings)) == len(tilings)


def test_codes_are_checked_with_the_kernel_that_may_stand_in(hopper: None, monkeypatch: pytest.MonkeyPatch):
    """Where ours is refused, experts' codes are widened for jax's kernel."""
    monkeypatch.setattr(grouped_matmul, "ragged_dot_module", lambda: grouped_matmul)
    config, params = model(HEADS, Experts(8, 2, 192))
    cases = list(kernel_cases(config, quantize_params(params, "int8"), SIZES))
    names = [case.name for case in cases if case.kernel.name.startswith("expert")]
    assert names == [
        "expert_tiles 128x192, bfloat16, int8, 1x192 scales in float32",
        "expert_product 128x192, bfloat16",
        "expert_tiles 192x128, bfloat16, int8, 1x128 scales in float32",
        "expert_product 192x128, bfloat16",
    ]


def test_rules_are_told_apart_from_checks():
    with traced_for("t4"):
        every = [check_kernel_case(case) for case in kernel_cases(*model(HEADS, dtype="float16"), SIZES)]
    assert {check.reason for check in every} == {"it needs compute capability 8.0, Tesla T4 has 7.5"}
    assert not any(check.was_tried for check in every)


def test_a_cpu_has_none_to_check():
    assert check_kernels(*model(HEADS), SIZES) == {}


def failing(*_: Any) -> Any:
    raise RuntimeError("Shared memory size limit exceeded\nrequested: 1, available: 0")


def lying(q: jax.Array, *_: Any) -> jax.Array:
    return jnp.full(q.shape, 1e-3, q.dtype)


def broken(q: jax.Array, *_: Any) -> jax.Array:
    return jnp.full(q.shape, jnp.nan, q.dtype)


@pytest.mark.parametrize(
    "mixer, kernels",
    [
        (
            GroupedQuery(4, 2, 128, window=300, softcap=5.0, sinks=True),
            {"attention_decode", "attention_prefill"},
        ),
        full(Latent(4, 128, 16, 128, 16), {"attention_decode", "attention_prefill"}),
        (GroupedQuery(4, 2, 32), set()),  # its rows fill no lanes, which a TPU's do
        (DeltaNet(2, 4, 16, 32), set()),
    ],
)
def test_a_tpu_checks_attention(mixer: Any, kernels: set[str], nowhere: None):
    with traced_for_tpu():
        found = check_kernels(*model(mixer), SIZES)
    assert {check.kernel for check in found.values()} == kernels
    assert all(
        check.was_tried and not check.reason and check.difference is not None for check in found.values()
    )


@pytest.mark.parametrize(
    "kernel, why",
    [
        (failing, "RuntimeError: Shared memory size limit exceeded"),
        (lying, "it differs from the reference by 1 of the largest number"),
        (broken, "ValueError: its result has another shape, or is not finite"),
    ],
)
def test_a_kernel_that_fails_or_computes_wrongly_is_refused(
    hopper: None, nowhere: None, monkeypatch: pytest.MonkeyPatch, kernel: Any, why: str, caplog: Any
):
    monkeypatch.setattr(attention, "attend_gpu", kernel)
    found = check_kernels(*model(UNTURNED), SIZES)
    assert {check.reason for check in found.values()} == {why}
    assert failed_kernel_names(found) == {"attention_decode", "attention_prefill"}
    assert sum("attention gathers pages" in line for line in caplog.messages) in (0, 2)  # once a process


def test_a_later_start_reads_stored_results(hopper: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    monkeypatch.setattr(executable_cache, "program_folder", lambda: tmp_path)
    given = *model(UNTURNED), SIZES
    found = check_kernels(*given)
    assert found and not failed_kernel_names(found)
    monkeypatch.setattr(attention, "attend_gpu", failing)
    assert check_kernels(*given) == found
    assert failed_kernel_names(check_kernels(*given, is_anew=True)) == {
        "attention_decode",
        "attention_prefill",
    }
    assert failed_kernel_names(check_kernels(*given))  # what raised is checked again
    monkeypatch.setattr(attention, "attend_gpu", lying)
    assert failed_kernel_names(check_kernels(*given))
    monkeypatch.undo()
    monkeypatch.setattr(executable_cache, "program_folder", lambda: tmp_path)
    assert failed_kernel_names(check_kernels(*given))  # what lied is kept


def test_a_hanging_kernel_ends_the_start_and_is_refused_later(
    hopper: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
):
    free, ran, given = Event(), [], (*model(UNTURNED), SIZES)
    monkeypatch.setattr(executable_cache, "program_folder", lambda: tmp_path)
    monkeypatch.setattr(kernel_checks, "RUN_SECONDS", 0.3)

    def waits(x: Any) -> Any:
        ran.append(x.shape)
        free.wait()
        return x

    with monkeypatch.context() as patch:
        patch.setattr(attention, "attend_gpu", lambda q, *_: jax.pure_callback(waits, q, q))
        found = check_kernels(*given)
        free.set()
    assert [check.kernel for check in found.values()] == ["attention_decode"]
    assert len(ran) <= 1, "nothing is checked behind it"  # none yet if the machine is slow
    with pytest.raises(RuntimeError, match="attention_decode .* did not end within 0.3 s: start again"):
        require_no_hang(found)
    monkeypatch.setattr(kernel_checks, "RUN_SECONDS", 300.0)
    found = check_kernels(*given)
    assert failed_kernel_names(found) == {"attention_decode"} and len(found) == 2
    require_no_hang(found)
    assert check_kernels(*given) == found


def test_a_slow_compilation_is_no_kernel_that_hangs(
    hopper: None, nowhere: None, monkeypatch: pytest.MonkeyPatch
):
    kernel, threads = attention.attend_gpu, set()

    def traced(*given: Any) -> Any:
        threads.add(current_thread().name)
        return kernel(*given)

    monkeypatch.setattr(attention, "attend_gpu", traced)
    found = check_kernels(*model(UNTURNED), SIZES)
    assert len(found) == 2 and not failed_kernel_names(found)
    assert threads == {"kernel check"}  # not "kernel run", which has the limit


def test_what_any_process_has_refused_is_refused_in_all(monkeypatch: pytest.MonkeyPatch):
    bad, good = KernelCheck("b", "it lies", 1.0, 2.0), KernelCheck("b", "", 0.0, 2.0)
    found = {"a 1": KernelCheck("a", "", 0.0, 1.0), "b 1": good, "b 2": bad}
    assert start.gather_refused_kernels(found) == ("b",)
    monkeypatch.setattr(rendezvous, "current_group", lambda: object())
    others = np.array([[True, False]])
    gather = partial(np.concatenate, axis=0)
    monkeypatch.setattr(
        rendezvous.multihost_utils, "process_allgather", lambda own: gather([own[None], others])
    )
    assert start.gather_refused_kernels(found) == ("a", "b")
    assert start.gather_refused_kernels({}) == ()


def test_a_reference_that_cannot_run_refuses_nothing(hopper: None, nowhere: None, monkeypatch: Any):
    monkeypatch.setattr(cases_of, "attend_by_reference", failing)
    found = check_kernels(*model(UNTURNED), SIZES)
    assert found and not failed_kernel_names(found) and all(check.has_raised for check in found.values())


REFUSED = {"attention_decode 6/2 heads of 32": KernelCheck("attention_decode", "it lies", 1.0, 2.0)}


def tokens_of(llm: LLM) -> list[Any]:
    asked = SamplingParams(temperature=0.0)
    outputs = llm.generate([[5, 6, 7], list(range(9, 40))], asked, use_tqdm=False)
    return [o.outputs[0].token_ids for o in outputs]


def key_of(llm: LLM) -> str | None:
    programs: Any = llm.engine.programs
    return programs.key


@greedy_programs()
def test_a_start_with_refused_kernels_serves_the_same_tokens(
    few_shapes: None, monkeypatch: pytest.MonkeyPatch
):
    """Its programs are traced without them, under keys of their own."""
    with LLM(DRAFT, **OPTIONS) as llm:
        expected, key, first = tokens_of(llm), key_of(llm), llm.report()["kernels"]
    assert first == {}
    monkeypatch.setattr(start, "check_kernels", lambda *_: REFUSED)
    # An earlier run may have stored them.
    monkeypatch.setattr(executable_cache, "load_program", lambda *_: None)
    seen = []
    lower = LocalLowering.lower

    def watched(self: Any, shape: Any) -> Any:
        seen.append(
            [may_use_kernel(kernel) for kernel in (attention.TRITON_DECODE, attention.TRITON_PREFILL)]
        )
        with traced_for("h200"):
            seen.append(
                [may_use_kernel(kernel) for kernel in (attention.TRITON_DECODE, attention.TRITON_PREFILL)]
            )
        return lower(self, shape)

    monkeypatch.setattr(LocalLowering, "lower", watched)
    with LLM(DRAFT, **OPTIONS) as llm:
        assert tokens_of(llm) == expected
        assert key_of(llm) != key
        assert llm.report()["kernels"] == {
            name: {"kernel": "attention_decode", "reason": "it lies", "difference": 1.0, "seconds": 2.0}
            for name in REFUSED
        }
        metrics: list[Any] = llm.get_metrics()
        used = {m.labels["kernel"]: m.value for m in metrics if m.name == "duetto:kernel_used"}
        assert used == dict.fromkeys(REFUSED, 0.0)
    assert seen and all(pair in ([False, False], [False, True]) for pair in seen)
    assert kernel_checks.failed_kernel_names(REFUSED) == {"attention_decode"}
