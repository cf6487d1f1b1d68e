"""Rules of GPUs: which of the kernels each may use, in which stages, and in which dtype it computes."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cases.gpus import traced_for

from duetto.kvcache.kernels import attention
from duetto.kvcache.kernels.attention import (
    TRITON_DECODE,
    TRITON_LATENT_DECODE,
    TRITON_LATENT_PREFILL,
    TRITON_PREFILL,
)
from duetto.kvcache.kernels.hopper_attention import HOPPER_PREFILL
from duetto.kvcache.kernels.recurrent_step import STEP_KERNEL, can_step_in_place
from duetto.kvcache.quantised import choose_cache_format, empty_pool
from duetto.model.attention import AttentionParams
from duetto.model.gpus import (
    NO_CUBLAS_OPTIONS,
    XLA_GPU_OPTIONS,
    Gpu,
    disable_kernels,
    gpu_from_device,
    may_use_kernel,
    refusal_reason,
    target_gpu,
)
from duetto.model.weights.expert_tiles import EXPERT_TILES_KERNEL
from duetto.model.weights.fixed_tiles import FIXED_KERNEL
from duetto.model.weights.gpu.code_tiles import CODE_PRODUCT_KERNEL, ROW_CODES_KERNEL
from duetto.model.weights.grouped_matmul import GROUPED_KERNEL
from duetto.model.weights.nibbles import NIBBLE_KERNEL
from duetto.serve.planner.roofline.targets import CHIPS
from duetto.serve.runtime.compiled.shapes import Shape

TRITON = {
    TRITON_DECODE,
    TRITON_PREFILL,
    TRITON_LATENT_DECODE,
    TRITON_LATENT_PREFILL,
    STEP_KERNEL,
    NIBBLE_KERNEL,
    ROW_CODES_KERNEL,
    CODE_PRODUCT_KERNEL,
    EXPERT_TILES_KERNEL,
}
MOSAIC = {FIXED_KERNEL, GROUPED_KERNEL, HOPPER_PREFILL}
ALLOWED = {
    "t4": set(), "l4": TRITON, "a100": TRITON, "b200": TRITON, "rtx4090": TRITON, "rtx5090": TRITON,
    "h100": TRITON | MOSAIC, "h200": TRITON | MOSAIC,
}  # fmt: skip
# Stages of a kernel's settings by dtype, queries of a row and size of a head; None is refused.
STAGES = {
    ("bfloat16", 1, 128): dict.fromkeys(ALLOWED, 3),
    ("bfloat16", 1, 256): dict.fromkeys(ALLOWED, 2),
    ("bfloat16", 512, 128): dict.fromkeys(ALLOWED, 3),
    ("bfloat16", 512, 192): dict.fromkeys(ALLOWED, 2) | dict.fromkeys(("l4", "rtx4090", "rtx5090"), 1),
    ("bfloat16", 512, 256): dict.fromkeys(ALLOWED, 2) | dict.fromkeys(("l4", "rtx4090", "rtx5090"), 1),
    ("float32", 1, 128): dict.fromkeys(ALLOWED, 2),
    ("float32", 1, 256): dict.fromkeys(ALLOWED, 2) | dict.fromkeys(("l4", "rtx4090", "rtx5090")),
    ("float32", 512, 128): dict.fromkeys(ALLOWED, 2),
    ("float32", 512, 256): dict.fromkeys(ALLOWED, 2)
    | dict.fromkeys(("l4", "rtx4090", "rtx5090"))
    | {"a100": 1},
}


def test_every_target_has_a_row():
    assert set(ALLOWED) == set(CHIPS)


@pytest.mark.parametrize("name", ALLOWED)
def test_a_gpu_may_use_what_its_compilers_know(name: str):
    with traced_for(name):
        assert {kernel for kernel in TRITON | MOSAIC if may_use_kernel(kernel)} == ALLOWED[name]


def layer(T: int, H: int, dtype: Any, kept: str = "auto") -> tuple[Any, Any, Any, AttentionParams]:
    pool = jax.eval_shape(lambda: empty_pool((2, 9, 16, H), choose_cache_format(kept, jnp.dtype(dtype))))
    return jax.ShapeDtypeStruct((1, T, 8, H), jnp.dtype(dtype)), pool, pool, AttentionParams(1.0)


@pytest.mark.parametrize("case", STAGES, ids=str)
@pytest.mark.parametrize("name", ALLOWED)
def test_shared_memory_decides_the_stages(name: str, case: tuple[str, int, int]):
    dtype, T, H = case
    q, k, v, reading = layer(T, H, dtype)
    expected = STAGES[case][name] if ALLOWED[name] else None
    with traced_for(name):
        refused = attention.kernel_refusal(q, k, v, reading)
        found = attention.compiler_settings(jnp.zeros((1, T, 2, 4, H), q.dtype), 16, reading, False)
    assert (refused is None) == (expected is not None)
    if expected is not None:
        assert found["compiler_params"].num_stages == expected
    elif ALLOWED[name]:
        assert f"{CHIPS[name].kind} has {CHIPS[name].gpu.shared_memory}" in str(refused)


def test_blocks_of_a_latent_layer_are_smaller_where_memory_is():
    reading = AttentionParams(1.0, rank=512)
    tight, rows = {"t4", "l4", "rtx4090", "rtx5090"}, {}
    for name in ALLOWED:
        with traced_for(name):
            rows[name] = attention.plan_key_split(1, 128, jnp.dtype("bfloat16"), reading)[1]
            q, k = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 1, 128, 576), (1, 9, 16, 576)))
            assert attention.fits_triton_kernel(q, k, None, reading)
            assert attention.has_attention_kernel(q, (k, None), reading) == (name not in tight)
            assert attention.plan_key_split(1, 128, q.dtype, reading)[1] == 16
    assert {name for name, n in rows.items() if n == 32} == tight
    assert set(rows.values()) == {32, 64}


def test_e4m3_is_read_where_it_can_be_converted():
    layers = [layer(1, 64, "bfloat16", kept) for kept in ("fp8_e4m3", "fp8_e5m2", "int8")]
    for name, possible in {"a100": [False, True, True], "l4": [True, True, True]}.items():
        with traced_for(name):
            assert [attention.kernel_refusal(*given) is None for given in layers] == possible


def test_a_refused_kernel_is_refused_in_its_block_only():
    with traced_for("h200"):
        with disable_kernels([TRITON_DECODE.name]):
            assert not may_use_kernel(TRITON_DECODE) and may_use_kernel(TRITON_PREFILL)
            pool = jnp.zeros((2, 4, 64, 64))
            assert can_step_in_place(pool)
            with disable_kernels([STEP_KERNEL.name]):
                assert may_use_kernel(TRITON_DECODE) and not can_step_in_place(pool)
        assert may_use_kernel(TRITON_DECODE)


def test_without_a_gpu_there_are_no_kernels():
    assert refusal_reason(TRITON_DECODE) == "no compiler for an NVIDIA GPU is here"


def test_compute_capability_comes_from_the_driver_before_the_name():
    def device(kind: str, **own: Any) -> Any:
        return SimpleNamespace(platform="gpu", device_kind=kind, **own)

    assert gpu_from_device(device("NVIDIA A10G", compute_capability="8.6")) == Gpu("NVIDIA A10G", (8, 6))
    assert gpu_from_device(device("NVIDIA A10G", compute_capability="8.6")).shared_memory == 101_376  # type: ignore[union-attr]
    assert gpu_from_device(device("NVIDIA GH200 480GB")) == Gpu("NVIDIA GH200 480GB", (9, 0))
    assert gpu_from_device(device("AMD Instinct MI300X", compute_capability="gfx942")) is None
    assert target_gpu() is None  # a CPU is here


def test_products_are_not_merged_where_that_would_copy_weights():
    options = {name: chip.gpu.compiler_options() for name, chip in CHIPS.items()}
    assert options.pop("t4") == XLA_GPU_OPTIONS | {"xla_gpu_dot_merger_threshold_mb": "0"}
    assert set(map(str, options.values())) == {str(XLA_GPU_OPTIONS)}
    of_codes = CHIPS["h200"].gpu.compiler_options(256, has_code_products=True)
    assert of_codes == XLA_GPU_OPTIONS | NO_CUBLAS_OPTIONS | {"xla_gpu_dot_merger_threshold_mb": "0"}
    assert "xla_gpu_experimental_autotune_backends" not in CHIPS["t4"].gpu.compiler_options(256)
    assert {name for name, chip in CHIPS.items() if chip.gpu.auto_dtype == "float16"} == {"t4"}


def test_reproducible_steps_have_no_products_that_cublas_splits():
    """Of the shapes of an engine for 256 requests."""
    widths = [Shape("decode", rows, 1) for rows in (1, 64, 128, 256)]
    others = [
        Shape("decode", 64, 4),
        Shape("prefill", 1, 512),
        Shape("verify", 64, 4),
        Shape("verify", 64, 8, 128),
    ]
    own = {
        name: [
            str(s)
            for s in widths + others
            if chip.gpu.compiler_options(s.product_rows) != chip.gpu.compiler_options()
        ]
        for name, chip in CHIPS.items()
    }
    assert own.pop("t4") == []
    split = ["decode[128,1]", "decode[256,1]", "verify[64,4]", "verify[64,8] of 128"]
    assert own == dict.fromkeys(own, split)


@pytest.mark.parametrize(
    "given, left_to_user",
    [
        (None, set()),
        ("--xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer_x=1", set()),
        (" --xla_gpu_enable_command_buffer=", {"xla_gpu_enable_command_buffer"}),
        ("--xla_gpu_experimental_force_split_k=0", {"xla_gpu_experimental_force_split_k"}),
        ("/home/me/flags.txt", set(XLA_GPU_OPTIONS)),
    ],
)
def test_the_users_flags_stay(monkeypatch: pytest.MonkeyPatch, given: str | None, left_to_user: set[str]):
    monkeypatch.setenv("XLA_FLAGS", given or "")
    if given is None:
        monkeypatch.delenv("XLA_FLAGS")
    assert CHIPS["h200"].gpu.compiler_options().keys() == XLA_GPU_OPTIONS.keys() - left_to_user
