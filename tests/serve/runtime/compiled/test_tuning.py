"""Products that an accelerator's compiler configured otherwise have another hash."""

from types import SimpleNamespace

from duetto.serve.runtime.compiled.tuning import tuning_hash

GEMM = '%{name} = f32[8,64]{{1,0}} fusion(%x), backend_config={{"num_warps":"{warps}"}}, metadata={{}}'
CODE = '%attend = f32[8,64]{1,0} custom-call(%x), backend_config={name = "attend", ir = "..."}'


def program(*lines: str) -> SimpleNamespace:
    return SimpleNamespace(as_text=lambda: "\n".join(lines))


def gemm(name: str, warps: int) -> str:
    return GEMM.format(name=name, warps=warps)


def test_names_and_order_do_not_matter_and_settings_do():
    one = program(gemm("a", 2), gemm("b", 4), CODE), program(gemm("c", 8))
    same = program(gemm("z", 8)), program(CODE, gemm("b.1", 4), gemm("a.1", 2))
    other = program(gemm("a", 2), gemm("b", 2), CODE), program(gemm("c", 8))
    assert tuning_hash(one) == tuning_hash(same) != tuning_hash(other)
