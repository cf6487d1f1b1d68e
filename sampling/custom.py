"""Logits processors of users: pure functions of one row's logits, compiled into the step.

`(logits [V], history, knobs) -> logits [V]`, all of one row: a step maps a function over its rows
(`jax.vmap`), so no row depends on its neighbours. It is traced once, at the start; the trace is what every
program runs, and what kept programs are found by.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..model.tree import pytree
from ..refusals import shown, unknown

F = TypeVar("F", bound=Callable[..., Any])
Value = bool | int | float | Sequence[bool | int | float]  # of a request's extra argument
ROWS = 8  # of the batch that a function is probed with
KINDS = {bool: np.bool_, int: np.int32, float: np.float32}


@pytree
class History:
    """A row's tokens so far, prompt and output; `tokens` is NO_TOKEN from `length` on. While a draft model
    drafts, it has none of the draft tokens, at any depth."""

    tokens: Any  # int32 [S], S = max_model_len
    length: Any  # int32 [], position of the token that is being chosen
    prompt_len: Any  # int32 []
    output_counts: Any  # int32 [V], how often each token was generated
    in_prompt: Any  # bool [V]

    @property
    def generated(self) -> Int[Array, ""]:
        """Tokens of the output so far."""
        return self.length - self.prompt_len


@pytree
class ProcessorKnobs:
    """A request's numbers for one processor, on the device."""

    asked: Any  # bool []
    values: Any  # {name: array}


def logits_processor(**knobs: Value) -> Callable[[F], F]:
    """Declare the knobs of a logits processor: names that a request sets in `extra_args`, with defaults.

    A default gives the type (bool, int32, float32) and, if it is a sequence, the size: a request's shorter
    sequence is filled up with the rest of the default. A request is processed if it sets one of the knobs.
    """

    def declare(function: F) -> F:
        setattr(function, ATTRIBUTE, knobs)
        return function

    return declare


ATTRIBUTE = "logits_processor_knobs"


@dataclass(frozen=True)
class LogitsProcessor:
    """A function as an engine runs it; equal ones compute the same. Pickled, as part of a stored program's
    tree, it has no `call`."""

    name: str
    defaults: tuple[tuple[str, Any], ...]  # of its knobs; a sequence is a tuple
    digest: str  # of what it computes
    call: Callable[..., Float[Array, " V"]] = field(compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"call": None}

    def row(self, extra: Mapping[str, Value]) -> ProcessorKnobs:
        """Return a request's numbers, in numpy. Raises ValueError or TypeError for one that its knob cannot
        have. Without knobs every request is processed."""
        asked = not self.defaults or any(name in extra for name, _ in self.defaults)
        given = {name: filled(name, extra.get(name, own), own) for name, own in self.defaults}
        return ProcessorKnobs(np.bool_(asked), given)


def knobs_of(processors: Sequence[LogitsProcessor], extra: Mapping[str, Value]) -> tuple[ProcessorKnobs, ...]:
    """Return a request's numbers for each processor. Raises ValueError or TypeError for a name or a value
    that is not allowed."""
    names = sorted({name for p in processors for name, _ in p.defaults})
    for name in extra:
        if not names:
            raise ValueError(f"extra_args={shown(dict(extra))} is not allowed: no logits processor has knobs")
        if name not in names:
            raise ValueError(f"extra_args: {unknown('name', name, names)}")
    return tuple(p.row(extra) for p in processors)


def are_asked(processors: Sequence[LogitsProcessor], extra: Mapping[str, Value]) -> bool:
    """True if one of the processors changes a request's logits."""
    return any(p.row(extra).asked for p in processors)


def filled(name: str, value: Any, default: Any) -> Any:
    """Return a value as its knob's array."""
    is_list, what = isinstance(default, tuple), f"extra_args[{name!r}]={shown(value)} is not allowed"
    if not is_list:
        return number(what, value, type(default))
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) > len(default):
        raise ValueError(f"{what}: a list of at most {len(default)}")
    whole = [*value, *default[len(value) :]]
    return np.array([number(what, x, type(own)) for x, own in zip(whole, default, strict=True)])


def number(what: str, value: Any, kind: type) -> Any:
    """Return a number as its type on the device."""
    ok = type(value) is kind or (kind is float and type(value) is int)
    limits = np.finfo(np.float32) if kind is float else np.iinfo(np.int32)
    if not ok or not (kind is bool or limits.min <= value <= limits.max):
        raise ValueError(f"{what}: {'true or false' if kind is bool else KINDS[kind].__name__}")
    return KINDS[kind](value)


# ---------------------------------------------------------------- from a function to a processor


def sources_of(given: Sequence[Any] | None) -> list[str]:
    """Return names of functions, each with a hash of the file that defines it, its knobs, and the values that
    it is bound to."""
    found = []
    for function in map(function_of, given or ()):
        own, hashed = inspect.unwrap(function), sha256()
        for part in as_text_of(function, set()), as_text_of(getattr(function, ATTRIBUTE, None), set()):
            hashed.update(part.encode())
        found.append(f"{own.__module__}:{own.__qualname__} {hashed.hexdigest()}")
    return found


def as_text_of(value: Any, seen: set[int]) -> str:
    """Return a value of a function as text that is the same in all processes. One that has no such text is
    its type's name."""
    if inspect.isfunction(value) or hasattr(value, "__wrapped__"):
        return "" if id(value) in seen else source_of(value, seen | {id(value)})
    if inspect.iscode(value):
        return as_text_of([value.co_code, value.co_names, value.co_varnames, *value.co_consts], seen)
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return f"{value.dtype}{value.shape}{sha256(np.asarray(value).tobytes()).hexdigest()}"
    if isinstance(value, Mapping):
        return as_text_of([*value.items()], seen)
    if isinstance(value, partial):
        return as_text_of([value.func, value.args, value.keywords], seen)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(as_text_of(x, seen) for x in value)}]"
    is_plain = value is None or isinstance(value, (bool, int, float, complex, str, bytes))
    return repr(value) if is_plain else getattr(value, "__qualname__", type(value).__qualname__)


def source_of(function: Any, seen: set[int]) -> str:
    """Return a hash of a function's file, or its code if it is of a notebook or a prompt, with the values
    that it is bound to."""
    if not inspect.isfunction(function):
        return as_text_of(function.__wrapped__, seen)
    code, bound_to = function.__code__, inspect.getclosurevars(function)
    try:
        text = sha256(Path(code.co_filename).read_bytes()).hexdigest()
    except (OSError, ValueError):  # there is no file that would have the globals
        text = as_text_of([code, bound_to.globals], seen)
    values = bound_to.nonlocals, function.__defaults__, function.__kwdefaults__
    return as_text_of([code.co_qualname, text, values, getattr(function, "__wrapped__", None)], seen)


def processors_of(given: Sequence[Any] | None, V: int, S: int) -> tuple[LogitsProcessor, ...]:
    """Trace and probe functions, or the names of such, for a vocabulary of V and sequences of at most S
    tokens. Raises TypeError or ValueError, naming the function and what is wrong with it."""
    return tuple(bound(function_of(x), V, S) for x in given or ())


def function_of(given: Any) -> Callable[..., Any]:
    """Return a function, or the one that "module:name" names."""
    if isinstance(given, str):
        module, _, path = given.partition(":")
        if not (module and path):
            raise ValueError(f"logits_processors has {given!r}: a function, or its name as module:function")
        try:
            given = attrgetter(path)(import_module(module))
        except (ImportError, AttributeError) as error:
            raise ValueError(f"logits_processors has {given!r}: {error}") from None
    if not callable(given) or inspect.ismethod(given) or not inspect.isfunction(inspect.unwrap(given)):
        raise TypeError(
            f"logits_processors has {shown(given)}: a function (logits, history, knobs) -> logits; numbers "
            "that a partial, a method or an object would hold are knobs of @logits_processor"
        )
    return given


def bound(function: Callable[..., Any], V: int, S: int) -> LogitsProcessor:
    """Trace a function, and check that it is pure."""
    name = getattr(function, "__qualname__", type(function).__name__)
    defaults = tuple((k, default_of(name, k, v)) for k, v in getattr(function, ATTRIBUTE, {}).items())
    inputs = jnp.zeros(V, jnp.float32), empty_history(V, S), {k: filled(k, v, v) for k, v in defaults}
    call, digest = traced(name, function, inputs)
    if traced(name, function, inputs)[1] != digest:
        raise ValueError(f"logits processor {name} is not pure: two traces of it compute different things")
    found = LogitsProcessor(name, defaults, digest, call)
    probe(found, inputs)
    return found


def default_of(processor: str, name: str, value: Any) -> Any:
    """Return a knob's default as a number or a tuple of numbers. Raises TypeError for anything else."""
    found = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
    found = tuple(found) if isinstance(found, list) else found
    parts = found if isinstance(found, tuple) else (found,)
    if not parts or any(type(x) is not type(parts[0]) or type(x) not in KINDS for x in parts):
        raise TypeError(
            f"logits processor {processor}: {name}={shown(value)} is no default of a knob: a bool, an int or "
            "a float, or a sequence of one of them"
        )
    return found


def empty_history(V: int, S: int) -> History:
    """The history of a row without tokens."""
    zero = jnp.int32(0)
    return History(jnp.full(S, -1, jnp.int32), zero, zero, jnp.zeros(V, jnp.int32), jnp.zeros(V, bool))


def traced(
    name: str, function: Callable[..., Any], inputs: tuple[Any, ...]
) -> tuple[Callable[..., Any], str]:
    """Return a function's trace, as a function, and a hash of all that it computes, constants included."""
    leaves, structure = jax.tree.flatten(inputs)
    closed, out = jax.make_jaxpr(
        lambda *flat: function(*jax.tree.unflatten(structure, flat)), return_shape=True
    )(*leaves)
    if effects := sorted(effects_of(closed.jaxpr)):
        raise ValueError(f"logits processor {name} is not pure: it has {', '.join(effects)}")
    wanted = [(x.shape, x.dtype) for x in leaves[:1]]
    if (found := [(x.shape, x.dtype) for x in jax.tree.leaves(out)]) != wanted:
        kinds = " and ".join(f"{dtype} {list(shape)}" for shape, dtype in found) or "nothing"
        raise ValueError(f"logits processor {name} returns {kinds}: float32 {list(wanted[0][0])}")
    flat = jax.extend.core.jaxpr_as_fun(closed)
    hashed = sha256(jax.jit(lambda *x: flat(*x)).lower(*leaves).as_text().encode())
    # the text has no constants where jax makes them arguments
    for constant in (*closed.consts, *constants_of(closed.jaxpr)):
        hashed.update(np.asarray(constant).tobytes())
    return lambda *args: flat(*jax.tree.leaves(args))[0], hashed.hexdigest()[:32]


def constants_of(jaxpr: Any) -> Iterator[Any]:
    """Yield the arrays and numbers in a trace, those of inner traces included."""
    for equation in jaxpr.eqns:
        yield from (x.val for x in equation.invars if isinstance(x, jax.extend.core.Literal))
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=is_closed):
            if is_closed(value):
                yield from value.consts
        for own in jax.extend.core.jaxprs_in_params(equation.params):
            yield from constants_of(own)


def is_closed(x: Any) -> bool:
    return hasattr(x, "jaxpr") and hasattr(x, "consts")


def effects_of(jaxpr: Any) -> set[str]:
    """Return the primitives of a trace that do more than compute: callbacks, prints, writes to references."""
    found = set()
    for equation in jaxpr.eqns:
        inner = list(jax.extend.core.jaxprs_in_params(equation.params))
        for own in inner:
            found |= effects_of(own)
        if not inner and (equation.effects or "callback" in equation.primitive.name):
            found.add(equation.primitive.name)
    return found


def probe(processor: LogitsProcessor, inputs: tuple[Any, ...]) -> None:
    """Run a processor on rows of random logits, of which the last has no tokens. Raises ValueError for NaN,
    and for a row whose bits change with the run or with the number of rows."""
    rng = np.random.default_rng(0)
    rows = jax.tree.map(lambda x: np.broadcast_to(x, (ROWS, *x.shape)), inputs)
    logits = rng.normal(0, 4, rows[0].shape).astype(np.float32)
    tokens = rng.integers(0, logits.shape[1], rows[1].tokens.shape, dtype=np.int32)
    lengths = (np.arange(ROWS, dtype=np.int32)[::-1] * (tokens.shape[1] - 1)) // ROWS
    tokens = np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, -1).astype(np.int32)
    history = History(tokens, lengths, lengths // 2, rows[1].output_counts, rows[1].in_prompt)
    run, batch = jax.jit(jax.vmap(processor.call)), (logits, history, rows[2])
    found, again = (np.asarray(run(*batch)) for _ in range(2))
    alone = [run(*jax.tree.map(lambda x, i=i: x[i : i + 1], batch)) for i in range(ROWS)]
    if np.isnan(found).any():
        raise ValueError(f"logits processor {processor.name} returns NaN for finite logits")
    if found.tobytes() != again.tobytes():
        raise ValueError(f"logits processor {processor.name} is not pure: two runs have other bits")
    if found.tobytes() != np.concatenate(alone).tobytes():
        raise ValueError(
            f"logits processor {processor.name} gives a row other bits alone than in a batch: add up with "
            "duetto.sampling.search.pairwise_sum, whose order no batch changes"
        )
