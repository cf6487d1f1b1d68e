"""Quantisation as an option: of a folder while it is loaded, of parameters at hand, in plans and in converted
folders."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.packers import LLAMA_CASES, experts, llama_folder, mxfp4, projection, quantise, random_folder
from cases.targets import compile_for
from cases.weights import drawn
from fakes.greedy import greedy_programs
from suite.marks import full

from duetto import LLM, SamplingParams
from duetto.checkpoints import huggingface, orbax
from duetto.checkpoints.huggingface import load_hf, save_hf
from duetto.cpu_kernels.library import load_library
from duetto.model.config import ModelConfig
from duetto.model.transformer import decoder_spec
from duetto.model.tree import has_instance, is_spec, leaves_by_path, map_by_path, tree_bytes
from duetto.model.weights.compression.compress import (
    WEIGHT_FORMS,
    dequantize_params,
    quantise_inputs,
    quantize_params,
)
from duetto.model.weights.device_forms import DeviceForms
from duetto.model.weights.input_quantised import InputQuantised
from duetto.model.weights.quant import Quantised
from duetto.serve.cli.convert import convert_model
from duetto.serve.cli.main import main
from duetto.serve.engine.startup import model_folder
from duetto.serve.engine.startup.model_folder import read_model, read_param_shapes
from duetto.serve.engine.weights.weight_update import make_root_hash
from duetto.serve.kv.offload.realm import hash_page_realm
from duetto.serve.llm.audit.facts import engine_facts, replay_options
from duetto.serve.options.engine import QUANTIZATIONS, EngineOptions
from duetto.serve.planner.engine_plan import EnginePlan, abstract_arguments
from duetto.serve.planner.roofline.floor import program_demand
from duetto.serve.planner.roofline.presets import PRESETS
from duetto.serve.planner.roofline.targets import MissingCompiler, find_target
from duetto.serve.runtime.compiled.shapes import Shape, Sizes

ROOT = Path(__file__).resolve().parents[4]
CONFIG = ModelConfig.uniform(64, 48, 96, 2, 4, 2, 16)
SMALL = {"max_num_seqs": 1, "max_prefill_tokens": 64, "max_model_len": 64, "page_size": 16}
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
PROMPTS = [[3, 9, 4], [7, 1, 5, 2, 30]]


def equal(a: Any, b: Any) -> bool:
    a, b = leaves_by_path(a), leaves_by_path(b)
    return list(a) == list(b) and all(
        x.dtype == b[path].dtype and np.array_equal(np.asarray(x), np.asarray(b[path]))
        for path, x in a.items()
    )


def schemes(params: Any) -> set[str]:
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Quantised))
    return {x.scheme for x in leaves if isinstance(x, Quantised)}


def tokens(llm: LLM) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def params():
    return drawn(
        jax.tree.map(lambda s: replace(s, mean=0.0, scale=0.3), decoder_spec(CONFIG), is_leaf=is_spec)
    )


@pytest.fixture(scope="module")
def folder(params, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("whole")
    save_hf(path, CONFIG, params)
    return path


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> dict[str, Path]:
    """Folders that are stored quantised: FP8 in blocks, GPTQ, and a gpt-oss with MXFP4 experts."""
    made = {}
    for case in ("fp8 blocks", "gptq asymmetric"):
        path = tmp_path_factory.mktemp("stored") / "made"
        made[case] = quantise(llama_folder(), path, *LLAMA_CASES[case], projection)[0]
    path = tmp_path_factory.mktemp("stored") / "made"
    wide = random_folder("gpt_oss", {"hidden_size": 64, "intermediate_size": 64})
    made["mxfp4"] = quantise(wide, path, {"quant_method": "mxfp4"}, mxfp4, experts)[0]
    return made


def test_the_options_are_those_that_weights_can_have():
    assert set(WEIGHT_FORMS) == {None, *QUANTIZATIONS}
    with pytest.raises(ValueError, match="quantization='int3' is not allowed: int8, int4, fp8, dequantize"):
        EngineOptions(quantization="int3")
    with pytest.raises(TypeError, match="quantization=8"):
        LLM(quantization=8)


ACTIVATIONS = {"quantization": "int8", "activations": "int8"}


def root_of_pages(llm: LLM) -> bytes:
    return make_root_hash(llm.engine.config, llm.engine.all_params, llm.options.kv_cache_dtype)


@pytest.mark.parametrize("scheme", ["int8", full("int4")])
@greedy_programs()
def test_activations_are_quantised_beside_weights(few_shapes, params, scheme: str):
    with LLM.from_params(CONFIG, params, quantization=scheme, cpu_kernels=False, **SMALL) as llm:
        weights_alone, pages = tokens(llm), root_of_pages(llm)
        realms = {hash_page_realm(llm.engine.programs, llm.engine.params, llm.options, e) for e in (0, 1)}
        facts = engine_facts(llm.engine, llm.options)
    coded = ACTIVATIONS | {"quantization": scheme, "cpu_kernels": False}
    with LLM.from_params(CONFIG, params, **coded, **SMALL) as llm:
        assert has_instance(llm.engine.params, InputQuantised) and schemes(llm.params) == {scheme}
        first = tokens(llm)
        assert root_of_pages(llm) != pages and first != weights_alone
        realms |= {hash_page_realm(llm.engine.programs, llm.engine.params, llm.options, e) for e in (0, 1)}
        assert len(realms) == 4
        assert engine_facts(llm.engine, llm.options).items() - facts.items() >= {("activations", "int8")}
        assert replay_options(llm.options)["activations"] == "int8"
        llm.update_params(jax.tree.map(jnp.negative, params))
        assert tokens(llm) != first and has_instance(llm.engine.params, InputQuantised)
        llm.update_params(params)
        assert tokens(llm) == first


@greedy_programs()
def test_activations_of_a_folder(few_shapes, folder: Path, params, tmp_path: Path):
    """Those that a checkpoint states need "auto"."""
    with LLM.from_params(CONFIG, params, **ACTIVATIONS, **SMALL) as llm:
        expected = tokens(llm)
    with LLM(folder, dtype="float32", **ACTIVATIONS, **SMALL) as llm:
        assert tokens(llm) == expected
    convert_model(folder, tmp_path / "orbax", quantization="int8")
    with LLM(tmp_path / "orbax", dtype="float32", activations="int8", **SMALL) as llm:
        assert tokens(llm) == expected
        with pytest.raises(
            ValueError,
            match=r"update_params: layers.0.attention.q is float32\[.*\], expected codes in int8: ",
        ):
            llm.update_params(params)
        llm.update_params(quantize_params(params, "int8"))
        assert tokens(llm) == expected
    with pytest.raises(ValueError, match="the model has no quantised projections; set quantization='int8'"):
        LLM(folder, activations="int8", **SMALL)
    with pytest.raises(
        ValueError, match="activations='auto' is what a checkpoint says, these are parameters"
    ):
        LLM.from_params(CONFIG, params, activations="auto", **SMALL)
    with pytest.raises(ValueError, match="activations='int4' is not allowed: None, int8, fp8, auto"):
        EngineOptions(activations="int4")


@greedy_programs()
def test_activations_that_a_checkpoint_states(few_shapes, tmp_path: Path):
    """ "auto" is the scheme that the folder states, for codes that a product takes."""
    config, pack = LLAMA_CASES["bytes"]
    coded, _ = quantise(llama_folder(), tmp_path / "w8a8", config, pack, projection)

    def served(activations: str | None) -> list[list[int]]:
        with LLM(coded, dtype="float32", activations=activations, **SMALL) as llm:
            scheme = DeviceForms.from_params(llm.engine.params).activations
            assert scheme == llm.options.activations == (activations and "int8")
            return tokens(llm)

    state_activations(coded, {"type": "int", "num_bits": 8, "strategy": "token", "dynamic": True})
    assert served("auto") == served("int8") and served(None)
    state_activations(coded, {"type": "int", "num_bits": 4})
    with pytest.raises(ValueError, match="config.json: activations='auto': input_activations are 'int' of 4"):
        served("auto")


@pytest.mark.parametrize("activations", [None, "int8"])
def test_a_dtype_that_the_folder_decides(folder: Path, monkeypatch, activations: str | None):
    """As on an accelerator, where "auto" stays."""
    monkeypatch.setattr(model_folder, "agree_on_dtype", lambda *_: "auto")
    options = EngineOptions(quantization="int8", activations=activations)
    _, loaded, _ = model_folder.load_folder(folder, "auto", options=options)
    assert loaded.embed.dtype == jnp.float32 and schemes(loaded) == {"int8"}
    assert has_instance(loaded, InputQuantised) == bool(activations)


def test_parameters_for_other_activations_are_refused(params):
    coded = quantise_inputs(quantize_params(params, "int8"), "int8")
    with pytest.raises(
        ValueError, match="activations=None is not allowed: the parameters are prepared for 'int8'"
    ):
        LLM.from_params(CONFIG, coded, **SMALL)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.0, "layers.1.ffn.up has scales of 0 beside codes that are not 0, expected scales other than 0"),
        (np.nan, "layers.1.ffn.up.scales holds NaN or infinity as float32"),
    ],
)
def test_codes_without_scales_are_refused_by_name(params, value: float, said: str):
    coded = map_by_path(
        quantize_params(params, "int8"),
        (),
        lambda path, x: x.at[0, 3].set(value) if path == "layers.1.ffn.up.scales" else x,
    )
    with pytest.raises(ValueError, match=f"parameter {said}"):
        LLM.from_params(CONFIG, coded, **SMALL)


def state_activations(folder: Path, activations: dict[str, Any]) -> None:
    """Change what a folder's `quantization_config` says of activations."""
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"]["config_groups"]["group_0"]["input_activations"] = activations
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_a_folder_is_quantised_while_it_is_loaded(folder: Path, params, scheme: str):
    _, found = load_hf(folder, quantization=scheme)
    assert equal(found, quantize_params(params, scheme)) and schemes(found) == {scheme}
    shapes = read_param_shapes(folder, "float32", scheme)
    assert jax.tree.structure(shapes) == jax.tree.structure(found) and tree_bytes(shapes) == tree_bytes(found)


@greedy_programs()
def test_given_parameters_are_quantised_and_stay_the_callers(few_shapes, params):
    with LLM.from_params(CONFIG, params, quantization="int8", **SMALL) as llm:
        assert equal(llm.params, quantize_params(params, "int8"))
        first = tokens(llm)
        llm.update_params(jax.tree.map(jnp.negative, params))
        assert tokens(llm) != first
        llm.update_params(params)
        assert tokens(llm) == first
    given = quantize_params(params, "int8")
    with LLM.from_params(CONFIG, given, cpu_kernels=False, **SMALL) as llm:
        assert llm.params is given and tokens(llm) == first
    assert not any(x.is_deleted() for x in jax.tree.leaves(params))


@pytest.mark.skipif(not load_library().isas, reason=load_library().refusal or "there are kernels")
@pytest.mark.parametrize("form", [None, "int8", "int4", "fp8"])
def test_cpu_kernels_multiply_tied_output_matrices_in_the_requested_form(form: str | None):
    """Of weights that are served later too; the engine's own parameters have no copy of the embedding."""
    config = replace(CONFIG, tied_embeddings=True)
    given = drawn(decoder_spec(config))
    with LLM.from_params(config, given, quantization=form, cpu_kernels=True, **SMALL) as llm:
        head, first = llm.engine.params.head, tokens(llm)
        assert head.is_tied and head.array.dtype == (jnp.int8 if form in ("int8", "int4") else jnp.float32)
        llm.update_params(jax.tree.map(jnp.negative, given))
        assert tokens(llm) != first
        llm.update_params(given)
        assert tokens(llm) == first and llm.params.head is None
        llm.update_params(llm.params)
        assert tokens(llm) == first


@pytest.mark.full
def test_pages_of_another_precision_have_other_hashes(params):
    """Of the weights, and of the cache."""
    roots = []
    for form, kept in ((None, "auto"), ("int8", "auto"), (None, "int8"), (None, "fp8_e4m3")):
        with LLM.from_params(CONFIG, params, quantization=form, kv_cache_dtype=kept, **SMALL) as llm:
            roots.append(llm.engine.scheduler.root_hash)
    assert len(set(roots)) == 4 and None not in roots


@pytest.mark.parametrize("case", [full("fp8 blocks"), full("gptq asymmetric"), full("mxfp4")])
@greedy_programs()
def test_quantised_weights_generate_the_tokens_of_dequantised_ones(
    few_shapes, stored: dict[str, Path], case: str
):
    with LLM(stored[case], dtype="float32", **SMALL) as llm:
        assert schemes(llm.params) == {{"f": "fp8", "g": "int4", "m": "fp4"}[case[0]]}
        kept, codes = tokens(llm), llm.params
    with LLM(stored[case], dtype="float32", quantization="dequantize", **SMALL) as llm:
        assert tokens(llm) == kept and not schemes(llm.params)
        assert equal(llm.params, dequantize_params(codes, "float32")) and tree_bytes(codes) < tree_bytes(
            llm.params
        )


def test_stored_codes_stay_in_their_scheme_and_convert_to_others(
    stored: dict[str, Path],
):
    kept, whole = (
        load_hf(stored["fp8 blocks"], "float32", quantization=form)[1] for form in (None, "dequantize")
    )
    assert equal(load_hf(stored["fp8 blocks"], "float32", quantization="fp8")[1], kept)
    assert equal(
        load_hf(stored["fp8 blocks"], "float32", quantization="int4")[1], quantize_params(whole, "int4")
    )
    assert equal(quantize_params(kept, "int4"), quantize_params(whole, "int4"))
    assert equal(quantize_params(kept, "fp8"), kept)


@pytest.mark.parametrize("case", [full("fp8 blocks"), "gptq asymmetric", full("mxfp4")])
def test_orbax_folders_hold_stored_codes(stored: dict[str, Path], case: str, tmp_path: Path):
    convert_model(stored[case], tmp_path / "new")
    (_, found), (_, kept) = orbax.load_orbax(tmp_path / "new"), huggingface.load_hf(stored[case])
    assert equal(found, kept) and jax.tree.structure(found) == jax.tree.structure(kept)
    shapes = read_param_shapes(tmp_path / "new", "float32", None)
    assert jax.tree.structure(shapes) == jax.tree.structure(kept) and tree_bytes(shapes) == tree_bytes(kept)
    widened = read_model(tmp_path / "new", "auto", jax.devices()[0], "dequantize")[1]
    assert equal(widened, huggingface.load_hf(stored[case], quantization="dequantize")[1])


def plan(capsys: pytest.CaptureFixture, *flags: str) -> dict[str, Any]:
    assert main(["plan", "--compile", "none", "--json", "--max-model-len", "64", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_counts_the_bytes_that_a_start_takes(stored: dict[str, Path], folder: Path, capsys):
    for path, form in [(folder, None), (folder, "int4"), *((made, None) for made in stored.values())]:
        flags = [] if form is None else ["--quantization", form]
        found = plan(capsys, "--model", str(path), "--no-cpu-kernels", *flags)
        params = read_model(path, "float32", jax.devices()[0], form)[1]
        assert found["memory"]["weights"] == tree_bytes(params)
        assert found["memory"]["weights"] < tree_bytes(load_hf(folder)[1]) or (path, form) != (folder, "int4")


def test_an_8b_model_in_four_bits_is_planned_without_it(capsys):
    whole, small = (
        plan(capsys, "--shape", "8b", "--dtype", "bfloat16", *f) for f in ((), ("--quantization", "int4"))
    )
    assert small["memory"]["weights"] < 0.4 * whole["memory"]["weights"]
    assert small["programs"][-1]["work"]["bytes"] < 0.5 * whole["programs"][-1]["work"]["bytes"]
    assert small["programs"][-1]["work"]["flops"] == whole["programs"][-1]["work"]["flops"]


def test_a_steps_bytes_count_quantised_weights_as_codes(params):
    step, small = Shape("decode", 1, 1), quantize_params(params, "int8")
    saved = (
        program_demand(step, CONFIG, jnp.float32, 9).bytes
        - program_demand(step, CONFIG, jnp.float32, 9, small).bytes
    )
    assert saved == tree_bytes(params) - tree_bytes(small)


@pytest.mark.parametrize("scheme", ["int8", "fp8", "int4"])
@pytest.mark.extras
def test_decoding_an_8b_model_writes_no_widened_weights(scheme: str):
    """Two layers of it, compiled for an H200; beside the tests of the same programs in test_targets.py."""
    try:
        target = find_target("h200")
    except MissingCompiler as error:
        pytest.skip(str(error))
    config = replace(PRESETS["8b"], layers=PRESETS["8b"].layers[:2], vocab_size=2048)
    sizes = Sizes(max_model_len=2048, max_num_seqs=32, pages=(1024,), page_size=64)
    job = EnginePlan(
        "test", config, "bfloat16", EngineOptions(quantization=scheme), target, sizes, context=1024
    )
    arguments = abstract_arguments(job)
    found = compile_for(job, Shape("decode", 32, 1), arguments).facts()
    largest = 2 * 4096 * 14336  # bytes of one projection in bfloat16
    assert schemes(arguments.params) == {scheme} and found.temporaries < 0.5 * largest


MEASURE = """
import re, sys
from pathlib import Path
import jax, jax.numpy as jnp
from duetto.checkpoints.huggingface import load_hf
from duetto.model.tree import tree_bytes

def resident(field):
    return 1024 * int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

jax.block_until_ready(jnp.ones(3) + 1)
before = resident("VmRSS")
config, params = load_hf(sys.argv[1], "float32", quantization=sys.argv[2])
print(resident("VmHWM") - before, tree_bytes(params))
"""


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux' /proc")
def test_loading_holds_the_quantised_model_and_one_weight(tmp_path: Path):
    config = ModelConfig.uniform(512, 1024, 4096, 8, 8, 8, 128, tied_embeddings=True)
    save_hf(
        tmp_path, config, jax.tree.map(lambda s: jnp.full(s.shape, 0.5, jnp.bfloat16), decoder_spec(config))
    )
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), "int8"],
        capture_output=True, text=True, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    peak, model = map(int, done.stdout.split())
    weight, whole = 4 * 1024 * 4096, 4 * 8 * (4 * 1024 * 1024 + 3 * 1024 * 4096)
    assert model < peak < model + 5 * weight + (24 << 20) < 0.5 * whole, (peak, model)
