"""Modules of vLLM's names: `duetto.v1.engine.async_llm` and others have the names of one of our modules."""

import sys
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

HOMES = {
    "beam_search": "serve.llm.tasks.beam",
    "engine.arg_utils": "compat.arg_utils",
    "engine.async_llm_engine": "compat.async_llm",
    "engine.llm_engine": "compat.llm_engine",
    "entrypoints.llm": "serve.llm.llm",
    "logprobs": "serve.text.outputs",
    "outputs": "serve.text.outputs",
    "utils": "compat.argparse_utils",
    "utils.argparse_utils": "compat.argparse_utils",
    "v1.engine.async_llm": "compat.async_llm",
    "v1.engine.llm_engine": "compat.llm_engine",
    "v1.metrics.reader": "serve.llm.metrics",
}


def install(package: ModuleType) -> None:
    """Add these modules, and packages around them, to `sys.modules` below a package."""
    for path, home in HOMES.items():
        module = package
        for part in path.split("."):
            name = f"{module.__name__}.{part}"
            if name not in sys.modules:
                sys.modules[name] = module_from_spec(ModuleSpec(name, None, is_package=True))
                setattr(module, part, sys.modules[name])
            module = sys.modules[name]
        vars(module)["__getattr__"] = partial(attribute, f"{package.__name__}.{home}")


def attribute(home: str, name: str) -> Any:
    """Return an attribute of our module, which is imported at the first use. Names of Python's own are not
    looked up: tools that inspect all of `sys.modules` import nothing."""
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_module(home), name)
