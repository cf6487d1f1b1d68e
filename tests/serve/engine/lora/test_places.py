"""Places on the device, and names, without a device."""

import re
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from duetto.lora.request import LoRARequest
from duetto.model.weights.adapted import NO_ADAPTER
from duetto.serve.engine.lora.places import Places
from duetto.serve.engine.lora.registry import Registry, registry_of
from duetto.serve.options.engine import EngineOptions
from duetto.serve.options.lora import modules_of


def adapter(name):
    return SimpleNamespace(digest=name.encode())


A, B, C = map(adapter, "abc")


def test_an_adapter_stays_until_its_place_is_wanted():
    places = Places(2)
    assert places.take(None) == NO_ADAPTER
    assert (places.take(A), places.take(A), places.take(B)) == (0, 0, 1)
    assert places.due() == {0: A, 1: B} and places.due() == {}
    assert not places.fits(C) and places.fits(A) and places.fits(None)
    places.release(A)
    assert not places.fits(C)  # it has another user
    places.release(A)
    assert places.fits(C) and places.take(A) == 0 and places.due() == {}
    places.release(B)
    places.release(A)
    assert places.take(C) == 1 and places.due() == {1: C}  # B's, used before A's
    assert places.fits(A) and places.fits(B) and places.take(B) == 0 and not places.fits(A)


def test_a_place_taken_twice_before_a_step_is_written_once():
    places = Places(1)
    places.take(A)
    places.release(A)
    places.take(B)
    assert places.due() == {0: B}


def test_after_a_loss_all_is_due_again():
    places = Places(1)
    places.take(A)
    with pytest.raises(AssertionError, match="in use"):
        places.forget()
    places.release(A)
    places.due()
    places.forget()
    assert places.take(A) == 0 and places.due() == {0: A}


def test_names_that_are_loaded_and_unloaded():
    read = []
    reader = SimpleNamespace(read=lambda path, name: read.append(str(path)) or object())
    registry = Registry(reader)
    one, other = LoRARequest("x", 1, "/one"), LoRARequest("x", 7, "/other")
    assert registry.of(one) is registry.of(one) and read == ["/one"]
    assert registry.of(other) is registry.of(other) is not registry.of(one)
    assert read == ["/one", "/other", "/one"] and registry.next_id() == 2
    with pytest.raises(ValueError, match=re.escape("unknown adapter 'xx', did you mean 'x'?")):
        registry.named("xx")
    registry.unload("x")
    assert registry.requests == []
    with pytest.raises(ValueError, match="no adapter 'x'"):
        registry.unload("x")


def test_modules_of_the_command_line():
    found = modules_of(["sql=/a=b", '{"name": "de", "path": "/c", "base_model_name": "m"}'])
    assert found == [LoRARequest("sql", 1, "/a=b"), LoRARequest("de", 2, "/c", "m")]
    for wrong in ("sql", "=x", "{", '{"name": "x"}', '{"name": 1, "path": "x"}'):
        with pytest.raises(ValueError, match="lora_modules .* is not allowed"):
            modules_of([wrong])
    with pytest.raises(ValueError, match="'x' has a path already"):
        modules_of(["x=a", "x=b"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("", 1, "x"), "lora_name '' is not allowed"),
        (("x", 0, "x"), "lora_int_id 0 is not allowed"),
        (("x", 1), "lora_path '' is not allowed"),
        (("x", 1, "x", None, {}), "tensorizer_config_dict is not supported"),
    ],
)
def test_requests_that_name_nothing(given, said):
    with pytest.raises(ValueError, match=said):
        LoRARequest(*given)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lora_modules": ["x=y"]}, "lora_modules is not allowed without enable_lora"),
        ({"enable_lora": True, "kv_role": "both"}, "kv_role both is not allowed with enable_lora"),
        ({"enable_lora": True, "nnodes": 2}, "nnodes 2 is not allowed with enable_lora: only 1"),
        ({"lora_experts": True}, "lora_experts is not allowed without enable_lora"),
        (
            {"enable_lora": True, "lora_experts": True, "tensor_parallel_size": 2},
            "tensor_parallel_size 2 is not allowed with lora_experts: only 1",
        ),
        (
            {"enable_lora": True, "experimental_ffn_devices": 1},
            "experimental_ffn_devices 1 is not allowed with enable_lora",
        ),
        ({"enable_lora": True, "max_loras": 0}, "max_loras 0 is not allowed: 1 or more"),
    ],
)
def test_options_beside_each_other(options, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        EngineOptions(**options)


@pytest.mark.parametrize("shown", [True, False])
def test_reading_adapters_is_shown(monkeypatch, capsys, shown: bool):
    monkeypatch.setattr(Registry, "load", lambda self, request: None)
    modules = ("a=/x", "b=/y")
    options = EngineOptions(enable_lora=True, lora_modules=modules, use_tqdm_on_load=shown)
    model: Any = None
    assert registry_of(options, model, model, jnp.zeros(1)) is not None
    assert ("reading adapters: 2/2" in capsys.readouterr().err) == shown
