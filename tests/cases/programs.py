"""Jitted functions of tests whose programs are stored as an engine's are: a second run finds them without
tracing."""

import inspect
import re
from collections.abc import Callable, Collection, Hashable
from functools import cache
from pathlib import Path
from typing import Any

import jax

from duetto.serve.runtime.compiled import executable_cache

ADDRESS = re.compile(r" at 0x\w+")  # in the names of functions among static arguments


@cache
def sources(file: Path) -> str:
    return executable_cache.sources_hash([file, Path(__file__).parent])


class StoredJit:
    """`jax.jit` of a function that computes from its arguments, its own file, `cases` and the library, none
    of which is patched."""

    def __init__(self, function: Callable[..., Any], static_argnames: Collection[str] = ()):
        self._jitted = jax.jit(function, static_argnames=static_argnames)
        self._signature, self._static = inspect.signature(function), static_argnames
        self._file, self._name = (
            Path(str(inspect.getsourcefile(inspect.unwrap(function)))),
            function.__qualname__,
        )
        self._programs: dict[Hashable, Any] = {}

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        given = self._signature.bind(*arguments, **named)
        given.apply_defaults()
        static = {name: given.arguments[name] for name in self._static}
        arrays = {name: value for name, value in given.arguments.items() if name not in static}
        leaves, structure = jax.tree.flatten(arrays)
        settings = jax.config.values["jax_disable_most_optimizations"]
        facts = *static.values(), structure, *map(jax.typeof, leaves), settings
        if facts not in self._programs:
            self._programs[facts] = self._program(static | arrays, facts)
        return self._programs[facts](**arrays)

    def _program(self, given: dict[str, Any], facts: tuple[Hashable, ...]) -> Any:
        device = jax.devices()[0]
        told = ADDRESS.sub("", repr(facts)), executable_cache.environment(device)
        key = executable_cache.combined([sources(self._file)], self._name, *told)
        found = executable_cache.load(key, device)
        return found or executable_cache.compile(key, self._jitted.lower(**given))
