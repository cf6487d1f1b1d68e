"""What a folder says of its use: sampling parameters as vLLM takes them, and every token that ends a text."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from duetto import SamplingParams
from duetto.checkpoints.generation import GenerationDefaults
from duetto.checkpoints.tensors import CheckpointError
from duetto.serve.engine.startup.dtype import normalise_dtype_name
from duetto.serve.engine.startup.model_folder import read_generation_defaults
from duetto.serve.engine.startup.model_source import ModelSource, remaining_quantization, with_end_tokens
from duetto.serve.options.engine import EngineOptions
from duetto.serve.text.tokenizer.tokenizer import Tokenizer


def folder(at: Path, generation: dict | None = None, **config) -> Path:
    (at / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (at / "generation_config.json").write_text(json.dumps(generation))
    return at


def words(at: Path, **config) -> Tokenizer:
    Backend(models.WordLevel({"a": 0, "<end>": 1, "b": 2}, unk_token="a")).save(str(at / "tokenizer.json"))
    (at / "tokenizer_config.json").write_text(json.dumps(config))
    found = Tokenizer.from_folder(at)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.6}),
        ({"do_sample": False}, {}),
        ({"max_new_tokens": 2048, "max_length": 20}, {"max_tokens": 2048}),
        ({"repetition_penalty": 1.1, "do_sample": False}, {"repetition_penalty": 1.1}),
        (
            {"presence_penalty": 0.5, "frequency_penalty": 1},
            {"presence_penalty": 0.5, "frequency_penalty": 1.0},
        ),
        ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
        ({"top_k": 50, "min_p": 0.1, "num_beams": 1, "typical_p": 1.0}, {"top_k": 50, "min_p": 0.1}),
        ({"temperature": None, "max_new_tokens": None}, {}),
    ],
    ids=str,
)
def test_the_authors_parameters_are_those_that_vllm_takes(tmp_path: Path, stated: dict, expected: dict):
    found = read_generation_defaults(folder(tmp_path, stated))
    assert SamplingParams.from_dict(found.sampling) == SamplingParams(**expected)


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"max_new_tokens": 1.5}, "max_new_tokens is 1.5, expected an integer"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 is not allowed: 1 or more"),
        ({"skip_special_tokens": 1}, "skip_special_tokens is 1, expected true or false"),
        ({"presence_penalty": 3}, "presence_penalty=3 is not allowed"),
    ],
    ids=str,
)
def test_wrong_values_are_refused_by_the_name_in_the_file(tmp_path: Path, stated: dict, said: str):
    with pytest.raises(CheckpointError, match="generation_config.json") as error:
        read_generation_defaults(folder(tmp_path, stated))
    assert said in str(error.value)


def test_end_tokens_are_those_of_all_three_files(tmp_path: Path):
    at = folder(tmp_path, {"eos_token_id": [7, 5]}, eos_token_id=2)
    assert read_generation_defaults(at).eos_token_ids == (7, 5, 2)
    assert with_end_tokens(read_generation_defaults(at), words(at, eos_token="<end>")).eos_token_ids == (
        1,
        7,
        5,
        2,
    )
    assert with_end_tokens(read_generation_defaults(at), words(at)).eos_token_ids == (7, 5, 2)
    assert with_end_tokens(read_generation_defaults(at), None).eos_token_ids == (7, 5, 2)


def test_a_turns_end_that_only_the_tokenizer_names_counts(tmp_path: Path):
    at = folder(tmp_path)
    assert with_end_tokens(read_generation_defaults(at), words(at, eos_token="<end>")).eos_token_ids == (1,)
    # an unknown one is added, with the next id
    assert with_end_tokens(read_generation_defaults(at), words(at, eos_token="unheard of")).eos_token_ids == (
        3,
    )


def test_too_many_end_tokens_are_refused_at_load(tmp_path: Path):
    many = GenerationDefaults(tuple(range(2, 66)))
    with pytest.raises(ValueError, match="eos_token_id has 65 ids with the tokenizer's, expected at most 64"):
        with_end_tokens(many, words(tmp_path, eos_token="<end>"))


class TorchLike:
    """As torch's dtypes are: no numpy knows them, but their text is their name."""

    def __str__(self) -> str:
        return "torch.bfloat16"


def test_dtypes_have_several_names():
    found = [
        normalise_dtype_name(dtype)
        for dtype in ("auto", "half", "float", "float16", "torch.float32", TorchLike())
    ]
    assert found == ["auto", "float16", "float32", "float16", "float32", "bfloat16"]
    assert {
        normalise_dtype_name(d) for d in (jnp.bfloat16, jnp.dtype("bfloat16"), jnp.zeros(1, "bfloat16").dtype)
    } == {"bfloat16"}
    for wrong in ("int8", "double", "torch.float64", float, jnp.int8, None, 3, object()):
        with pytest.raises(ValueError, match=r"dtype .* is not allowed: \"auto\", \"float32\""):
            normalise_dtype_name(wrong)


STORED = {"quantization_config": {"quant_method": "awq", "bits": 4}}


@pytest.mark.parametrize(
    ("config", "asked", "left"),
    [
        (STORED, None, None),
        (STORED, "awq", None),
        (STORED, "awq_marlin", None),
        (STORED, "int8", "int8"),
        (STORED, "dequantize", "dequantize"),
        (STORED, "fp8", "fp8"),
        ({}, "fp8", "fp8"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq_marlin", None),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8", None),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors", None),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4", None),
    ],
    ids=str,
)
def test_a_checkpoint_may_be_asked_for_as_it_is_stored(tmp_path: Path, config: dict, asked, left):
    at = folder(tmp_path, **config)
    assert remaining_quantization(at, asked) == left
    assert ModelSource(at, at).resolve_options(EngineOptions(quantization=asked)).quantization == left


@pytest.mark.parametrize(("config", "found"), [(STORED, "'awq'"), ({}, "not quantised")], ids=str)
def test_what_is_stored_in_another_way_is_refused(tmp_path: Path, config: dict, found: str):
    said = rf"config.json: quant_method is {found}, expected 'gptq' for quantization='gptq'"
    with pytest.raises(CheckpointError, match=said):
        remaining_quantization(folder(tmp_path, **config), "gptq")
