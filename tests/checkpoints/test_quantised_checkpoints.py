"""Checkpoints stored in eight and four bits: read as floats and kept as codes, they hold the same numbers."""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.packers import (
    AWQ,
    FP8,
    GPTQ,
    LLAMA_CASES,
    Packer,
    Parts,
    awq,
    compressed,
    compressed_bytes,
    compressed_words,
    experts,
    fp8_blocks,
    fp8_scaled,
    gptq,
    llama_folder,
    mxfp4,
    nvfp4,
    projection,
    quantise,
    random_folder,
    write,
)
from suite.marks import full_if

from duetto.checkpoints.huggingface import load_hf, read_hf_specs
from duetto.checkpoints.tensors import CheckpointError
from duetto.model.attention import causal
from duetto.model.transformer import Decoder, compute_logits, forward
from duetto.model.tree import shapes_from_specs
from duetto.model.weights.compression.compress import dequantize_params


def equal_models(quantised: Path, exact: Path) -> Decoder:
    """Read as floats, and kept as codes, the model has the same numbers; gives the codes."""
    config, expected = load_hf(exact, jnp.float32)
    for form in ("dequantize", None):
        found_config, found = load_hf(quantised, jnp.float32, quantization=form)
        assert config == found_config
        jax.tree.map(np.testing.assert_array_equal, dequantize_params(found, jnp.float32), expected)
    specs = read_hf_specs(quantised, jnp.float32)
    assert forms(found) == forms(shapes_from_specs(specs, jnp.dtype(jnp.float32)))
    return found


def forms(tree: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree)


@pytest.mark.parametrize("case", LLAMA_CASES)
def test_a_small_llama_is_read_to_the_bit(case: str, tmp_path: Path):
    method, pack = LLAMA_CASES[case]
    equal_models(*quantise(llama_folder(), tmp_path / "made", method, pack, projection))


SCALES = ("q_scale", "k_scale", "v_scale", "kv_scale", "k_proj.output_scale", "o_proj.input_scale")


@pytest.mark.parametrize("case", ["awq", "gptq", "fp8 tensor", "compressed"])
def test_scales_of_activations_and_of_the_cache_change_nothing(case: str, tmp_path: Path):
    method, pack = LLAMA_CASES[case]
    config, tensors = llama_folder()
    beside = {f"model.layers.1.self_attn.{name}": np.full(1, 3, np.float32) for name in SCALES}
    made = quantise((config, tensors | beside), tmp_path / "made", method, pack, projected)
    _, plain = quantise((config, tensors), tmp_path / "plain", method, pack, projection)
    equal_models(made[0], plain)


def projected(name: str) -> bool:
    return projection(name) and name.endswith(".weight")


@pytest.mark.parametrize("case", ["awq", "gptq ordered", "fp8 blocks", "words with zeros", "bytes in groups"])
def test_pieces_of_any_size_are_the_same(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("duetto.checkpoints.tensors.PIECE_BYTES", 700)
    method, pack = LLAMA_CASES[case]
    equal_models(*quantise(llama_folder(), tmp_path / "made", method, pack, projection))


EVEN = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16,
}  # fmt: skip
CUT = {"hidden_size": 60, "intermediate_size": 52}  # no words of 8 are full
PHI = {"hidden_size": 80, "intermediate_size": 96}


def indexed(name: str) -> bool:
    """What folders of DeepSeek-V3.2 store in FP8."""
    projected = projection(name) or ".wq_b" in name or ".wk." in name
    return projected and "weights_proj" not in name


TINY_CASES: dict[str, tuple[str, dict[str, int], dict[str, Any], Packer, Callable[[str], bool]]] = {
    "deepseek": ("deepseek_v3", {}, FP8 | {"weight_block_size": [16, 24]}, fp8_blocks(16, 24), projection),
    "indexed": ("deepseek_v32", {}, FP8 | {"weight_block_size": [16, 24]}, fp8_blocks(16, 24), indexed),
    "awq": ("llama", EVEN, AWQ | {"group_size": 32}, awq(32), projection),
    "gptq": ("llama", EVEN, GPTQ | {"group_size": 32}, gptq(32, symmetric=False), projection),
    "phi3": ("phi3 plain", PHI, AWQ | {"group_size": 16}, awq(16), projection),
    "words": (
        "llama",
        CUT,
        compressed("pack-quantized", num_bits=4, symmetric=False),
        compressed_words(-1, 4, False),
        projection,
    ),
    "bytes": ("phi3 plain", PHI, compressed("int-quantized"), compressed_bytes(-1), projection),
    "experts": (
        "mixtral",
        {},
        compressed("pack-quantized", num_bits=4, group_size=2),
        compressed_words(2),
        lambda name: ".experts." in name,
    ),
    "fp4": (
        "phi3 plain",
        PHI,
        compressed("nvfp4-pack-quantized", num_bits=4, group_size=16),
        nvfp4("_packed"),
        projection,
    ),
    "mixtral": ("mixtral", {}, FP8, fp8_scaled("_scale", False), lambda name: ".experts." in name),
}


@full_if(lambda case, piece: piece == 999 and case != "awq")
@pytest.mark.parametrize("case", TINY_CASES)
@pytest.mark.parametrize("piece", [1 << 20, 999])
def test_tiny_models_are_read_to_the_bit(
    case: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("duetto.checkpoints.tensors.PIECE_BYTES", piece)
    family, sizes, method, pack, chosen = TINY_CASES[case]
    equal_models(*quantise(random_folder(family, sizes), tmp_path / "made", method, pack, chosen))


def test_modelopt_may_write_a_file_of_its_own(tmp_path: Path):
    made, exact = quantise(llama_folder(), tmp_path / "made", *LLAMA_CASES["modelopt"], projection)
    config = json.loads((made / "config.json").read_text())
    stated = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": []}
    del config["quantization_config"]
    (made / "config.json").write_text(json.dumps(config))
    (made / "hf_quant_config.json").write_text(json.dumps({"quantization": stated}))
    equal_models(made, exact)
    (made / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(CheckpointError, match="quantization_config: quant_algo is 'W4A8_AWQ', which is not"):
        load_hf(made)
    (made / "hf_quant_config.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match="hf_quant_config.json: quantization is None, expected an object"
    ):
        load_hf(made)


@pytest.mark.parametrize("piece", [1 << 20, 999])
def test_mxfp4_is_read_to_the_bit(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("duetto.checkpoints.tensors.PIECE_BYTES", piece)
    folder = tmp_path / "made"
    wide = random_folder("gpt_oss", {"hidden_size": 64, "intermediate_size": 64})  # blocks of 32 divide both
    equal_models(*quantise(wide, folder, {"quant_method": "mxfp4"}, mxfp4, experts))


@pytest.mark.extras
def test_transformers_widens_mxfp4_alike(tmp_path: Path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    theirs: Any = import_module("transformers.integrations.mxfp4")
    w = np.random.default_rng(2).normal(0, 1, (3, 64, 10)).astype(np.float32)
    parts, exact = mxfp4("x", w)
    blocks, scales = (torch.tensor(parts["x" + part]) for part in ("_blocks", "_scales"))
    found = theirs.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    np.testing.assert_array_equal(found.numpy(), exact)


@pytest.mark.parametrize("block", [(32, 64), (7, 9)])
@pytest.mark.extras
def test_transformers_widens_fp8_alike(block: tuple[int, int]):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    theirs: Any = import_module("transformers.integrations.finegrained_fp8")
    parts, exact = fp8_blocks(*block)(
        "x", np.random.default_rng(2).normal(0, 1, (70, 100)).astype(np.float32)
    )
    codes = torch.tensor(parts["x"].view(np.uint8)).view(torch.float8_e4m3fn)
    scales = torch.tensor(parts["x_scale_inv"])
    found = theirs._dequantize_fp8_weight(codes, scales, list(block), torch.float32)
    np.testing.assert_array_equal(found.numpy(), exact)


def test_quantised_checkpoints_generate_the_same_text(tmp_path: Path):
    """Eight bits hardly move the logits of the whole model; another order of the bits would."""
    source = llama_folder()
    made, _ = quantise(source, tmp_path / "made", *LLAMA_CASES["gptq 8 bits"], projection)
    whole = write(tmp_path / "whole", *source)
    tokens = np.random.default_rng(0).integers(0, 64, (2, 12), np.int32)
    places = np.broadcast_to(np.arange(12, dtype=np.int32)[None], tokens.shape)

    def logits(folder: Path) -> np.ndarray:
        config, params = load_hf(folder, jnp.float32)
        run = jax.jit(lambda p: compute_logits(p, config, forward(p, config, tokens, places, causal)[0]))
        return np.asarray(run(params))

    expected, found = logits(whole), logits(made)
    assert 0 < np.abs(found - expected).max() < 0.03 * np.abs(expected).max()


Change = Callable[[dict[str, Any], Parts], None]
Q = "model.layers.0.self_attn.q_proj."


def replace_part(name: str, make: Callable[[np.ndarray], np.ndarray]) -> Change:
    return lambda config, tensors: tensors.update({Q + name: make(tensors[Q + name])})


def without(name: str) -> Change:
    return lambda config, tensors: tensors.__delitem__(Q + name)


def with_field(**fields: Any) -> Change:
    return lambda config, tensors: config["quantization_config"].update(fields)


def with_weights(**fields: Any) -> Change:
    def change(config: dict[str, Any], tensors: Parts) -> None:
        group = config["quantization_config"]["config_groups"]["group_0"]
        weights = {**group["weights"], **fields}
        config["quantization_config"]["config_groups"] = {"group_0": {**group, "weights": weights}}

    return change


def without_zeros_beside_floats(config: dict[str, Any], tensors: Parts) -> None:
    with_fp8_group(config)
    without("weight_zero_point")(config, tensors)


def with_fp8_group(config: dict[str, Any]) -> None:
    method = config["quantization_config"]
    method["config_groups"] = {**method["config_groups"], "b": {"weights": {"type": "float", "num_bits": 8}}}


def with_zero(scales: np.ndarray) -> np.ndarray:
    return np.concatenate([scales[:3], 0 * scales[3:4], scales[4:]]).astype(np.float32)


LOST = "layers.0.attention.q has scales of 0 beside codes that are not 0, expected scales other than 0"
REFUSED: dict[str, tuple[str, Change, str]] = {
    "no scale": ("fp8 blocks", without("weight_scale_inv"), "has no _scale_inv or _scale beside it"),
    "scale shape": (
        "fp8 blocks", replace_part("weight_scale_inv", lambda s: s[:-1]),
        r"q_proj.weight_scale_inv' has dtype F32 and shape \(2, 2\), expected floats of shape \(3, 2\)",
    ),
    "scale type": (
        "fp8 tensor", replace_part("weight_scale", lambda s: s.astype(np.int32)), "has dtype I32 and shape",
    ),
    "nan": (
        "fp8 tensor", replace_part("weight", lambda w: np.full(w.shape, 255, np.uint8).view(w.dtype)),
        "q_proj.weight' holds NaN",
    ),
    "no zeros": ("awq", without("qzeros"), "qweight' has no .qzeros beside it"),
    "scales": ("awq", replace_part("scales", lambda s: s[1:]), "expected floats of shape"),
    "zeros": ("gptq", replace_part("qzeros", lambda s: s[1:]), "expected 32-bit words of shape"),
    "words": (
        "gptq", replace_part("qweight", lambda s: s.view(np.float32)), "expected a matrix of 32-bit words",
    ),
    "shape": ("gptq", replace_part("qweight", lambda s: s[:-1]), "expected"),
    "group": ("gptq ordered", replace_part("g_idx", lambda g: g + 1), "expected numbers of groups, 0 to 5"),
    "group size": ("awq", with_field(group_size=32), "expected floats of shape"),
    "group zero": ("awq", with_field(group_size=0), "group_size is 0"),
    "bits as a float": ("gptq", with_field(bits=4.0), "bits is 4.0, expected a positive integer"),
    "infinite scales": (
        "gptq", replace_part("scales", lambda s: np.full_like(s, np.inf)), "scales' holds NaN or infinity",
    ),
    "scales of 0": ("fp8 blocks", replace_part("weight_scale_inv", np.zeros_like), LOST),
    "one scale of 0": ("bytes", replace_part("weight_scale", with_zero), LOST),
    "two names of a scale": (
        "fp8 blocks",
        lambda config, tensors: tensors.update({Q + "weight_scale": tensors[Q + "weight_scale_inv"]}),
        "has _scale_inv and _scale beside it, expected one",
    ),
    "the weight twice": (
        "gptq",
        lambda config, tensors: tensors.update({Q + "weight": np.zeros((2, 2), np.float32)}),
        "q_proj.weight' and '.*q_proj.qweight' are one weight",
    ),
    "bits": ("gptq", with_field(bits=3), "bits is 3, which is not supported"),
    "version": ("awq", with_field(version="gemv"), "version is 'gemv', which is not supported"),
    "no zero point": ("awq", with_field(zero_point=False), "zero_point is False, which is not supported"),
    "format": ("gptq", with_field(checkpoint_format="marlin"), "checkpoint_format is 'marlin'"),
    "format by its other name": ("gptq", with_field(format="marlin"), "format is 'marlin'"),
    "marlin": ("gptq", with_field(is_marlin_format=True), "is_marlin_format is True"),
    "gemv": ("awq", with_field(checkpoint_format="gemv"), "checkpoint_format is 'gemv'"),
    "bits of a module": (
        "gptq ordered", replace_part("g_idx", lambda g: np.repeat(g, 32)), "expected 32-bit integers of",
    ),
    "blocks of two sizes": (
        "compressed", with_field(config_groups={
            n: {"weights": {"block_structure": [32, m]}} for n, m in (("a", 32), ("b", 64))
        }),
        r"block_structure is \(32, 32\) and \(32, 64\), expected one of all groups",
    ),
    "a block that is none": (
        "compressed", with_field(config_groups={"a": {"weights": {"block_structure": "32x32"}}}),
        "block_structure is '32x32', expected two positive integers",
    ),
    "block": (
        "fp8 blocks", with_field(weight_block_size=[128]), r"weight_block_size is \[128\], expected two",
    ),
    "method": ("awq", with_field(quant_method="aqlm"), "quant_method is 'aqlm', which is not supported"),
    "packed": (
        "compressed", with_field(format="marlin-24"), "format is 'marlin-24', which is not supported"
    ),
    "packed bits": (
        "words", with_weights(num_bits=3), "num_bits is 3, which is not supported: expected 4 or 8",
    ),
    "words of other bits": (
        "words", with_weights(num_bits=8),
        r"dtype I32 and shape \(80, 12\), expected words of \(80, 96\) integers in 8",
    ),
    "no size of a group": ("words", with_weights(group_size=0), "group_size is 0, expected a positive"),
    "another size of a group": (
        "words", with_weights(group_size=32),
        r"_scale' has dtype F16 and shape \(80, 6\), expected floats of",
    ),
    "no zeros of words": ("words with zeros", without("weight_zero_point"), "has no _zero_point beside it"),
    "no zeros beside floats": (
        "words with zeros",
        without_zeros_beside_floats,
        "has no _zero_point beside it",
    ),
    "zeros of words": (
        "words with zeros", replace_part("weight_zero_point", lambda z: z[1:]),
        r"shape \(9, 6\), expected I32 of shape \(10, 6\)",
    ),
    "no shape": ("words", without("weight_shape"), "weight_packed' has no _shape beside it"),
    "a shape of one number": ("words", replace_part("weight_shape", lambda n: n[:1]), "expected two"),
    "a negative shape": ("words", replace_part("weight_shape", lambda n: -n), "holds -80 and -96, no shape"),
    "a large shape": (
        "words", replace_part("weight_shape", lambda n: n * 2**40), "expected words of .* integers in 4 bits",
    ),
    "groups of words": (
        "words ordered", replace_part("weight_g_idx", lambda g: g + 1), "expected numbers of groups, 0 to 5",
    ),
    "infinite scales of words": (
        "words", replace_part("weight_scale", lambda s: np.full_like(s, np.nan)), "holds NaN or infinity",
    ),
    "integers as scales": (
        "words", replace_part("weight_scale", lambda s: s.view(np.uint8)[:, ::2]), "expected numbers in BF16",
    ),
    "algorithm": ("modelopt", with_field(quant_algo="NVFP4_AWQ"), "quant_algo is 'NVFP4_AWQ', which is not"),
    "algorithm of a layer": (
        "modelopt", with_field(quantized_layers={"a": {"quant_algo": "W8A16"}}), "quant_algo is 'W8A16'",
    ),
    "layers": ("modelopt", with_field(quantized_layers=["a"]), "expected an object of objects"),
    "a field of a layer": (
        "modelopt", with_field(quantized_layers={"a": {"quant_algo": "FP8", "rotation": 1}}),
        "quantized_layers.a.rotation is 1, but the field is not known",
    ),
    "a global scale beside FP8": (
        "words",
        lambda config, tensors: tensors.update({Q + "weight_global_scale": np.ones(1, np.float32)}),
        "no global scale beside such codes",
    ),
    "no second scale": ("modelopt", without("weight_scale_2"), "has no _global_scale or _scale_2 beside it"),
    "no global scale": ("fp4", without("weight_global_scale"), "has no _global_scale or _scale_2 beside it"),
    "a global scale of zero": (
        "fp4", replace_part("weight_global_scale", np.zeros_like), "holds 0.0, expected a positive number",
    ),
    "a global scale that is NaN": (
        "fp4", replace_part("weight_global_scale", lambda s: s * np.float32(np.nan)), "holds NaN or infinity",
    ),
    "several global scales": (
        "fp4", replace_part("weight_global_scale", lambda s: np.repeat(s, 2)), "expected one float",
    ),
    "scales that overflow": (
        "fp4", replace_part("weight_global_scale", lambda s: s * np.float32(1e-43)), "holds NaN or infinity",
    ),
    "words as pairs": (
        "fp4", replace_part("weight_packed", lambda w: w.view(np.int32)), "has no _shape beside it",
    ),
    "zeros of bytes": (
        "bytes with zeros", replace_part("weight_zero_point", lambda z: z.astype(np.int32)),
        r"expected I8 of shape \(80, 1\)",
    ),
    "zeros of floats": (
        "compressed",
        lambda config, tensors: tensors.update({Q + "weight_zero_point": np.zeros((80, 1), np.int8)}),
        "expected no zeros beside floats",
    ),
    "bits as a list": ("bytes", with_weights(num_bits=[8]), r"num_bits is \[8\], expected a"),
    "symmetry": ("bytes", with_weights(symmetric=1), "symmetric is 1, expected true or false"),
    "type": ("bytes", with_weights(type="complex"), "type is 'complex', which is not supported"),
    "rotations": (
        "compressed", with_field(transform_config={"config_groups": {"R1": {}}}),
        r"transform_config is {'config_groups': {'R1': {}}}, but the field is not known",
    ),
    "sparse": (
        "compressed", with_field(sparsity_config={"format": "sparse-24-bitmask"}),
        "sparsity_config is {'format': 'sparse-24-bitmask'}, which is not supported",
    ),
    "a field of a group": (
        "compressed", with_field(config_groups={"a": {"rotation": 1}}),
        "config_groups.a.rotation is 1, but the field is not known",
    ),
    "a field of a group's weights": (
        "compressed", with_field(config_groups={"a": {"weights": {"codebook": [1]}}}),
        r"config_groups.a.weights.codebook is \[1\], but the field is not known",
    ),
    "another pack": ("gptq", with_field(pack_dtype="int64"), "pack_dtype is 'int64', which is not supported"),
    "unknown to gptq": ("gptq", with_field(rotation="hadamard"), "rotation is 'hadamard', but the"),
}  # fmt: skip


def changed_folder(name: str, change: Change, path: Path) -> Path:
    """A small llama, stored as one of LLAMA_CASES and then changed."""
    method, pack = LLAMA_CASES[name]
    config, tensors = llama_folder()
    stored: Parts = {}
    for key, w in tensors.items():
        stored |= pack(key, w)[0] if projection(key) else {key: w}
    config["quantization_config"] = dict(method)
    change(config, stored)
    return write(path, config, stored)


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_one_sentence(case: str, tmp_path: Path):
    name, change, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message) as refused:
        load_hf(changed_folder(name, change, tmp_path / "made"))
    assert "\n" not in str(refused.value) and str(tmp_path) in str(refused.value)


@pytest.mark.parametrize(("dtype", "code"), [(np.float32, 0), (np.float16, 5)])
def test_scales_may_be_0_where_numbers_are_and_negative(dtype: type, code: int, tmp_path: Path):
    """In float16 the scale of numbers close to 0 is 0, whatever their codes are."""

    def change(config: dict[str, Any], tensors: Parts) -> None:
        tensors[Q + "weight"][3] = code
        tensors[Q + "weight_scale"] = -with_zero(tensors[Q + "weight_scale"]).astype(dtype)

    found = load_hf(changed_folder("bytes", change, tmp_path / "made"), jnp.float32)[1].layers[0].attention.q
    assert found.scales.dtype == dtype and not np.asarray(found.dequantise(jnp.float32))[:, 0, 3].any()
