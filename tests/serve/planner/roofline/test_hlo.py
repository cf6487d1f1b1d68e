"""The reader of optimised modules: its bytes are XLA's own where nothing loops, and loops and branches count
as they run."""

import jax
import jax.numpy as jnp
import pytest

from duetto.serve.planner.roofline.hlo import (
    Module,
    ModuleExecution,
    PoolBuffer,
    main_memory_bytes,
    type_bytes,
)

pytestmark = pytest.mark.as_served

X, W = jnp.ones((64, 512)), jnp.ones((512, 1024))
TABLE, ROWS = jnp.ones((4096, 256)), jnp.arange(16, dtype=jnp.int32)


def compiled(function, *arguments, **options) -> jax.stages.Compiled:
    return jax.jit(function, **options).lower(*arguments).compile()


def counted(text: str, **options) -> int:
    return ModuleExecution(Module.parse(text), **options).bytes_accessed


@pytest.mark.parametrize(
    "function, arguments",
    [
        (lambda x, w: jax.nn.relu(x @ w) + 1, (X, W)),
        (lambda x: jnp.exp(x - x.max(-1, keepdims=True)), (W,)),
        (lambda x: x.T.reshape(-1)[:4096] + 1, (W,)),
    ],
    ids=["product", "softmax", "slice"],
)
def test_bytes_are_those_that_xla_counts(function, arguments):
    program = compiled(function, *arguments)
    analysed = program.cost_analysis()
    assert analysed is not None
    assert counted(program.as_text() or "") == pytest.approx(analysed["bytes accessed"], rel=0.02)


def test_a_gather_touches_its_rows():
    """XLA's own analysis charges it the whole table."""
    text = compiled(lambda table, rows: table[rows] * 2, TABLE, ROWS).as_text() or ""
    assert counted(text) == 2 * 16 * 256 * 4 + ROWS.nbytes


def test_an_update_in_place_touches_what_is_new():
    def put(x, new, i):
        return jax.lax.dynamic_update_slice(x, new * 2, (i, 0))

    new = jnp.ones((4, 256))
    program = compiled(put, TABLE, new, 7, donate_argnums=0)
    assert 2 * new.nbytes <= counted(program.as_text() or "") < 4 * new.nbytes
    kept = compiled(put, TABLE, new, 7)  # a control: what may not be written over is copied first
    assert counted(kept.as_text() or "") > 2 * TABLE.nbytes


def test_a_loop_counts_as_often_as_it_runs():
    def steps(n):
        return lambda x: jax.lax.fori_loop(0, n, lambda i, x: jnp.sin(x) @ x, x)

    x = jnp.ones((256, 256))
    few, many = (counted(compiled(steps(n), x).as_text() or "") for n in (10, 30))
    assert 2.8 < many / few < 3.0


def test_loops_of_unknown_length_take_the_given_count():
    def over(pool, n):
        return jax.lax.fori_loop(0, n, lambda i, x: x + pool[i].sum(), jnp.float32(0))

    text = compiled(over, TABLE, 5).as_text() or ""
    blocks = PoolBuffer(TABLE.nbytes, TABLE.nbytes, 9)
    one, three = counted(text), counted(text, default_trips=3)
    assert three - one == 2 * (counted(text, default_trips=2) - one) > 0
    assert counted(text, pool_buffers=(blocks,)) == counted(text, default_trips=9)


def test_of_branches_the_cheapest_or_the_dearest_counts():
    def either(x, w, wanted):
        return jax.lax.cond(wanted, lambda: jnp.tanh(x @ w).sum(), lambda: x[0, 0])

    module = Module.parse(compiled(either, X, W, True).as_text() or "")
    assert (
        ModuleExecution(module).bytes_accessed
        < 4096
        < W.nbytes
        < ModuleExecution(module, takes_costliest_branches=True).bytes_accessed
    )


KERNEL = """HloModule jit_step, num_partitions=2

ENTRY %main (pool: bf16[8,64,64,128], q: bf16[4,128]) -> bf16[4,128] {
  %pool = bf16[8,64,64,128]{3,2,1,0} parameter(0)
  %q = bf16[4,128]{1,0} parameter(1)
  %call = (bf16[4,128]{1,0}, bf16[8,64,64,128]{3,2,1,0}) custom-call(%q, /*index=1*/%pool), \
custom_call_target="kernel"ALIAS
  %far = bf16[4,128]{1,0:T(8,128)S(1)} copy(%q)
  ROOT %out = bf16[4,128]{1,0} get-tuple-element(%call), index=0
}
"""
POOL, ONE = 8 * 64 * 64 * 128 * 2, 4 * 128 * 2


@pytest.mark.parametrize(
    "rest, pools, bytes",
    [
        (", output_to_operand_aliasing={{1}: (1, {})}", (), POOL + 2 * ONE),
        (", output_to_operand_aliasing={{1}: (1, {})}", (PoolBuffer(POOL, 1000, 1),), 2 * 1000 + 2 * ONE),
        (', backend_config={"cost_estimate":{"flops":"9","bytes_accessed":"777"}}', (), 777),
        ("", (), 2 * POOL + 2 * ONE),
    ],
    ids=["aliased", "live", "estimated", "copied"],
)
def test_a_kernel_touches_its_live_or_declared_bytes(rest: str, pools: tuple[PoolBuffer, ...], bytes: int):
    module = Module.parse(KERNEL.replace("ALIAS", rest))
    assert module.devices == 2
    assert (
        ModuleExecution(module, pools).bytes_accessed == bytes + ONE
    )  # and the copy into fast memory reads its operand


def test_types_are_read_with_their_memory():
    assert type_bytes("(bf16[2,3]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/f32[5]{0}, pred[])") == 12 + 20 + 1
    assert type_bytes("(f4e2m1fn[4,8]{1,0:E(4)}, u2[9]{0:E(2)}, f8e4m3fn[3]{0}, s64[1]{0})") == 16 + 3 + 3 + 8
    assert main_memory_bytes("(bf16[2,3]{1,0:T(8,128)(2,1)S(1)}, f32[5]{0}, u32[]{:S(2)})") == 20
