"""Jitted functions of tests whose programs are stored as an engine's are: a second run finds them without
tracing."""

import inspect
import re
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any

import jax
from jaxtyping import config

from duetto.serve.host import identity
from duetto.serve.runtime.compiled import executable_cache

ADDRESS = re.compile(r" at 0x\w+")  # in the names of functions among static arguments


@cache
def sources(file: Path) -> str:
    """The hash of a test's file, of the cases, and of what decides checks and options of compilers."""
    tests = Path(__file__).parents[1]
    checks = tests / "annotations.py", tests / "suite" / "quick.py"
    return identity.hash_sources([file, tests / "cases", *checks])


class StoredJit:
    """`jax.jit` of a function that computes from its arguments, its own file, `cases` and the library, none
    of which is patched. A function among its static arguments is one of a module."""

    def __init__(self, function: Callable[..., Any], static_argnames: Collection[str] = ()):
        self._jitted = jax.jit(function, static_argnames=static_argnames)
        self._signature, self._static = inspect.signature(function), static_argnames
        self._sources = sources(Path(str(inspect.getsourcefile(inspect.unwrap(function)))))
        self._name, self._programs = function.__qualname__, dict[str, Any]()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        given = self._signature.bind(*arguments, **named)
        given.apply_defaults()
        static = {name: given.arguments[name] for name in self._static}
        arrays = {name: value for name, value in given.arguments.items() if name not in static}
        leaves, structure = jax.tree.flatten(arrays)
        settings = jax.config.values["jax_disable_most_optimizations"], config.jaxtyping_disable
        facts = *static.values(), structure, *map(jax.typeof, leaves), settings
        told = ADDRESS.sub("", repr(facts))
        assert "<locals>" not in told and "<lambda>" not in told
        if told not in self._programs:
            self._programs[told] = self._program(static | arrays, told)
        return self._programs[told](**arrays)

    def _program(self, given: dict[str, Any], told: str) -> Any:
        if "LogitsProcessor(" in told:  # from a stored tree it would come back without its function
            return self._jitted.lower(**given).compile()
        device = jax.devices()[0]
        key = executable_cache.combine_keys(
            [self._sources], self._name, told, identity.gather_facts("program", device)
        )
        found = executable_cache.load_program(key, device)
        return found or executable_cache.compile_and_store(key, self._jitted.lower(**given))
