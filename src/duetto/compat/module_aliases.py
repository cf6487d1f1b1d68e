"""Modules under vLLM's names: `duetto.v1.engine.async_llm` and others have the names of one of our
modules."""

import sys
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

MODULE_HOMES = {
    "benchmarks.datasets": "compat.datasets",
    "beam_search": "serve.llm.tasks.beam",
    "config": "compat.config",
    "config.kv_transfer": "compat.config",
    "distributed": "compat.platforms",
    "engine.arg_utils": "compat.arg_utils",
    "engine.async_llm_engine": "compat.async_llm",
    "engine.llm_engine": "compat.llm_engine",
    "entrypoints.llm": "serve.llm.llm",
    "inputs": "prompt_types",
    "logger": "compat.script_utils",
    "logprobs": "serve.text.outputs",
    "model_executor.model_loader": "compat.model_loader",
    "outputs": "serve.text.outputs",
    "platforms": "compat.platforms",
    "renderers": "compat.renderers",
    "renderers.inputs.preprocess": "compat.renderers",
    "utils": "compat.argparse_utils",
    "utils.argparse_utils": "compat.argparse_utils",
    "utils.network_utils": "compat.script_utils",
    "v1.engine.async_llm": "compat.async_llm",
    "v1.engine.llm_engine": "compat.llm_engine",
    "v1.metrics.reader": "serve.llm.metrics",
}
PROCESSORS_HINT = (
    "logits processors are functions that are compiled into the step: LLM(logits_processors=[f])"
)
# Modules of vLLM without a counterpart, and the alternative.
REFUSED_MODULES = {
    "distributed.kv_transfer.kv_connector.v1": "LLM(hidden_state_layers=[1, 2]) reports hidden states, and "
    "kv_transfer_config has the connectors that are here",
    "distributed.parallel_state": "LLM(nnodes=2, node_rank=0) makes one model of several processes",
    "utils.gpu_sync_debug": PROCESSORS_HINT,
    "utils.torch_utils": PROCESSORS_HINT,
    "v1.sample.logits_processor": PROCESSORS_HINT,
    "v1.sample.logits_processor.builtin": PROCESSORS_HINT,
    "v1.worker.gpu.sample.logits_processor": PROCESSORS_HINT,
}


def install_modules(package: ModuleType) -> None:
    """Add vLLM's modules, and the packages around them, to `sys.modules` below a package."""
    for path, home in MODULE_HOMES.items():
        vars(ensure_module(package, path))["__getattr__"] = partial(
            lazy_attribute, f"{package.__name__}.{home}"
        )
    for path, instead in REFUSED_MODULES.items():
        vars(ensure_module(package, path))["__getattr__"] = partial(refuse_name, path, instead)


def ensure_module(package: ModuleType, path: str) -> ModuleType:
    """Return the module of a path below a package. Missing modules are created, with the packages around
    them."""
    module = package
    for part in path.split("."):
        name = f"{module.__name__}.{part}"
        if name not in sys.modules:
            sys.modules[name] = module_from_spec(ModuleSpec(name, None, is_package=True))
            setattr(module, part, sys.modules[name])
        module = sys.modules[name]
    return module


def refuse_name(path: str, instead: str, name: str) -> Any:
    """Raise ImportError, with the alternative, for a name of a module of vLLM without a counterpart."""
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(f"{name} of vllm.{path} is not here: {instead}")


def lazy_attribute(home: str, name: str) -> Any:
    """Return an attribute of our module, which is imported at the first use.

    Python's own names are not looked up: tools that inspect all of `sys.modules` import nothing.
    """
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_module(home), name)
