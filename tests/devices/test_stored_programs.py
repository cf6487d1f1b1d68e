"""Programs of several devices kept on disk: a second start finds them, on the devices in their order."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from cases.weights import random
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from suite.fixtures import Model
from suite.marks import full

from duetto import LLM, SamplingParams
from duetto.model.layers import einsum
from duetto.model.sharding import Layout
from duetto.model.weights.compression.compress import encode_weight
from duetto.serve.engine.startup.mesh import param_shardings, place_params, shard_params
from duetto.serve.runtime.compiled import executable_cache
from duetto.serve.runtime.compiled.lowering import LocalLowering
from duetto.serve.runtime.equal_bits import classes
from duetto.serve.runtime.pipeline.stage_lowering import StageLowering

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
OPTIONS = {"max_num_seqs": 4, "max_prefill_tokens": 32, "max_model_len": 64, "page_size": 16}
PAIR = Layout(tensor=2)
pytestmark = pytest.mark.usefixtures("own_programs")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(executable_cache, "program_folder", lambda: tmp_path)
    return tmp_path


def served(model: Model, params: Any, options: dict[str, Any]) -> tuple[list[int], Any]:
    """The tokens of a request, and the programs of an engine."""
    with LLM.from_params(model.config, params, **OPTIONS | options) as llm:
        (out,) = llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
        return list(out.outputs[0].token_ids), llm.engine.programs


def fails(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("this was kept")


@pytest.mark.parametrize(
    "layout, options",
    [
        (PAIR, {}),
        full(Layout(data=2), {"data_parallel_size": 2}),
        full(Layout(stages=2), {}),
        full(Layout(ffn=1), {"experimental_ffn_devices": 1}),
    ],
    ids=["tensor", "data", "stages", "halves"],
)
@pytest.mark.usefixtures("few_shapes")
def test_a_second_start_neither_lowers_nor_probes(tiny, oracle, folder, layout, options, monkeypatch):
    params = shard_params(tiny.config, tiny.params, layout)
    tokens, _ = served(tiny, params, options)
    assert tokens == oracle(tiny)([5, 6, 7], GREEDY)
    monkeypatch.setattr(LocalLowering, "lower", fails)
    monkeypatch.setattr(StageLowering, "lower", fails)
    monkeypatch.setattr(classes, "probe_classes", fails)
    assert served(tiny, params, options)[0] == tokens


@pytest.mark.usefixtures("few_shapes")
def test_devices_in_another_order_have_programs_of_their_own(one_layer, folder):
    devices = np.array(jax.devices())
    alone, _ = served(one_layer, one_layer.params, {})
    for are_stored in (False, True):
        for own in (devices, devices[::-1]):
            where = param_shardings(one_layer.config, PAIR, Mesh(own, ("tensor",)))
            tokens, found = served(one_layer, place_params(where, one_layer.params), {})
            assert tokens == alone and found.are_all_stored == are_stored
            for program in (part for shape in found.steps for part in found.step_parts(shape)):
                assert list(program.runtime_executable().local_devices()) == list(own)


def test_a_program_that_cannot_be_kept_is_compiled(folder):
    """Weights in 8 bits divide their products by functions, which no file can hold."""
    mesh = Mesh(np.array(jax.devices()), ("tensor",))
    x, w = random(3, 64), encode_weight(random(64, 32, seed=1), (0,), "int8")
    split = jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, P(None, "tensor"))), w)
    program = executable_cache.compile_and_store("key", jax.jit(partial(einsum, "td,df->tf")).lower(x, split))
    np.testing.assert_allclose(program(x, split), einsum("td,df->tf", x, w), atol=1e-5)
    assert not list(folder.iterdir())
