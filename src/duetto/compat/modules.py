"""Modules of vLLM's names: `duetto.v1.engine.async_llm` and others have the names of one of our modules."""

import sys
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

HOMES = {
    "benchmarks.datasets": "compat.datasets",
    "beam_search": "serve.llm.tasks.beam",
    "config": "compat.config",
    "config.kv_transfer": "compat.config",
    "distributed": "compat.platforms",
    "engine.arg_utils": "compat.arg_utils",
    "engine.async_llm_engine": "compat.async_llm",
    "engine.llm_engine": "compat.llm_engine",
    "entrypoints.llm": "serve.llm.llm",
    "logger": "compat.logger",
    "logprobs": "serve.text.outputs",
    "model_executor.model_loader": "compat.model_loader",
    "outputs": "serve.text.outputs",
    "platforms": "compat.platforms",
    "renderers": "compat.renderers",
    "renderers.inputs.preprocess": "compat.renderers",
    "utils": "compat.argparse_utils",
    "utils.argparse_utils": "compat.argparse_utils",
    "utils.network_utils": "compat.network_utils",
    "v1.engine.async_llm": "compat.async_llm",
    "v1.engine.llm_engine": "compat.llm_engine",
    "v1.metrics.reader": "serve.llm.metrics",
}
PROCESSORS = "logits processors are functions that are compiled into the step: LLM(logits_processors=[f])"
# Modules whose names are not here, and what there is instead.
REFUSED = {
    "distributed.kv_transfer.kv_connector.v1": "LLM(hidden_state_layers=[1, 2]) reports hidden states, and "
    "kv_transfer_config has the connectors that are here",
    "distributed.parallel_state": "LLM(nnodes=2, node_rank=0) makes one model of several processes",
    "utils.gpu_sync_debug": PROCESSORS,
    "utils.torch_utils": PROCESSORS,
    "v1.sample.logits_processor": PROCESSORS,
    "v1.sample.logits_processor.builtin": PROCESSORS,
    "v1.worker.gpu.sample.logits_processor": PROCESSORS,
}


def install(package: ModuleType) -> None:
    """Add these modules, and packages around them, to `sys.modules` below a package."""
    for path, home in HOMES.items():
        vars(made(package, path))["__getattr__"] = partial(attribute, f"{package.__name__}.{home}")
    for path, instead in REFUSED.items():
        vars(made(package, path))["__getattr__"] = partial(refuse, path, instead)


def made(package: ModuleType, path: str) -> ModuleType:
    """Return the module of a path below a package, made with the packages around it if it is not there."""
    module = package
    for part in path.split("."):
        name = f"{module.__name__}.{part}"
        if name not in sys.modules:
            sys.modules[name] = module_from_spec(ModuleSpec(name, None, is_package=True))
            setattr(module, part, sys.modules[name])
        module = sys.modules[name]
    return module


def refuse(path: str, instead: str, name: str) -> Any:
    """Raise ImportError for a name of one of vLLM's modules, with what there is instead."""
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(f"{name} of vllm.{path} is not here: {instead}")


def attribute(home: str, name: str) -> Any:
    """Return an attribute of our module, which is imported at the first use. Names of Python's own are not
    looked up: tools that inspect all of `sys.modules` import nothing."""
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_module(home), name)
