"""Places on the device, and names, without a device."""

import re
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from duetto.lora.request import LoRARequest
from duetto.model.weights.lora import NO_ADAPTER
from duetto.serve.engine.lora.lora_slots import LoRASlots
from duetto.serve.engine.lora.registry import AdapterRegistry, make_adapter_registry
from duetto.serve.options.engine import EngineOptions
from duetto.serve.options.lora import parse_lora_modules


def adapter(name):
    return SimpleNamespace(digest=name.encode())


A, B, C = map(adapter, "abc")


def test_an_adapter_stays_until_its_slot_is_needed():
    places = LoRASlots(2)
    assert places.reserve(None) == NO_ADAPTER
    assert (places.reserve(A), places.reserve(A), places.reserve(B)) == (0, 0, 1)
    assert places.pop_due() == {0: A, 1: B} and places.pop_due() == {}
    assert not places.fits(C) and places.fits(A) and places.fits(None)
    places.release(A)
    assert not places.fits(C)  # it has another user
    places.release(A)
    assert places.fits(C) and places.reserve(A) == 0 and places.pop_due() == {}
    places.release(B)
    places.release(A)
    assert places.reserve(C) == 1 and places.pop_due() == {1: C}  # B's, used before A's
    assert places.fits(A) and places.fits(B) and places.reserve(B) == 0 and not places.fits(A)


def test_a_slot_reserved_twice_before_a_step_is_written_once():
    places = LoRASlots(1)
    places.reserve(A)
    places.release(A)
    places.reserve(B)
    assert places.pop_due() == {0: B}


def test_after_clear_adapters_are_written_again():
    places = LoRASlots(1)
    places.reserve(A)
    with pytest.raises(AssertionError, match="in use"):
        places.clear()
    places.release(A)
    places.pop_due()
    places.clear()
    assert places.reserve(A) == 0 and places.pop_due() == {0: A}


def test_adapters_are_loaded_and_unloaded_by_name():
    read = []
    reader = SimpleNamespace(read=lambda path, name: read.append(str(path)) or object())
    registry = AdapterRegistry(reader)
    one, other = LoRARequest("x", 1, "/one"), LoRARequest("x", 7, "/other")
    assert registry.get_or_load_adapter(one) is registry.get_or_load_adapter(one) and read == ["/one"]
    assert (
        registry.get_or_load_adapter(other)
        is registry.get_or_load_adapter(other)
        is not registry.get_or_load_adapter(one)
    )
    assert read == ["/one", "/other", "/one"] and registry.next_id() == 2
    with pytest.raises(ValueError, match=re.escape("unknown adapter 'xx', did you mean 'x'?")):
        registry.get_request("xx")
    registry.unload("x")
    assert registry.requests == []
    with pytest.raises(ValueError, match="no adapter 'x'"):
        registry.unload("x")


def test_modules_of_the_command_line():
    found = parse_lora_modules(["sql=/a=b", '{"name": "de", "path": "/c", "base_model_name": "m"}'])
    assert found == [LoRARequest("sql", 1, "/a=b"), LoRARequest("de", 2, "/c", "m")]
    for wrong in ("sql", "=x", "{", '{"name": "x"}', '{"name": 1, "path": "x"}'):
        with pytest.raises(ValueError, match="lora_modules .* is not allowed"):
            parse_lora_modules([wrong])
    with pytest.raises(ValueError, match="'x' has a path already"):
        parse_lora_modules(["x=a", "x=b"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("", 1, "x"), "lora_name '' is not allowed"),
        (("x", 0, "x"), "lora_int_id 0 is not allowed"),
        (("x", 1), "lora_path '' is not allowed"),
        (("x", 1, "x", None, {}), "tensorizer_config_dict is not supported"),
    ],
)
def test_incomplete_lora_requests_are_refused(given, said):
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
def test_conflicting_lora_options_are_refused(options, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        EngineOptions(**options)


@pytest.mark.parametrize("shown", [True, False])
def test_reading_adapters_is_shown(monkeypatch, capsys, shown: bool):
    monkeypatch.setattr(AdapterRegistry, "load", lambda self, request: None)
    modules = ("a=/x", "b=/y")
    options = EngineOptions(enable_lora=True, lora_modules=modules, use_tqdm_on_load=shown)
    model: Any = None
    assert make_adapter_registry(options, model, model, jnp.zeros(1)) is not None
    assert ("reading adapters: 2/2" in capsys.readouterr().err) == shown
