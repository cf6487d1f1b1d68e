"""Logits processors of users: pure functions of one row's logits, compiled into the step.

A function is `(logits [V], history, knobs) -> logits [V]` for one row. A step maps it over its rows
(`jax.vmap`), so no row depends on its neighbours. It is traced once, at the start. Every program runs that
trace, and stored programs are found by its hash.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib import import_module
from operator import attrgetter
from typing import Any, TypeVar

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from ..model.tree import pytree
from ..refusals import quote, unknown_name_message

F = TypeVar("F", bound=Callable[..., Any])
KnobValue = bool | int | float | Sequence[bool | int | float]  # value of a knob in a request's `extra_args`
PROBE_ROWS = 8  # rows of the batch that a function is probed with
DEVICE_TYPES = {bool: np.bool_, int: np.int32, float: np.float32}


@pytree
class History:
    """Tokens of a row so far, prompt and output; `tokens` is NO_TOKEN from `length` on. While a draft model
    drafts, the history has no draft tokens, at any depth."""

    tokens: Any  # int32 [S], S = max_model_len
    length: Any  # int32 [], position of the token that is being chosen
    prompt_len: Any  # int32 []
    output_counts: Any  # int32 [V], how often each token was generated
    in_prompt: Any  # bool [V]

    @property
    def generated(self) -> Int[Array, ""]:
        """Number of output tokens so far."""
        return self.length - self.prompt_len


@pytree
class ProcessorKnobs:
    """Knobs of one request for one processor, on the device.

    is_active: True if the processor runs for the request
    values: array of each knob, by name
    """

    is_active: Any  # bool []
    values: Any  # {name: array}


def logits_processor(**knobs: KnobValue) -> Callable[[F], F]:
    """Declare the knobs of a logits processor: names that a request sets in `extra_args`, with defaults.

    A default gives the type (bool, int32, float32). If it is a sequence, it also gives the size: a request's
    shorter sequence is filled up with the rest of the default. A request is processed if it sets one of the
    knobs.
    """

    def declare(function: F) -> F:
        """Attach the knobs to a function."""
        setattr(function, KNOBS_ATTRIBUTE, knobs)
        return function

    return declare


KNOBS_ATTRIBUTE = "logits_processor_knobs"


@dataclass(frozen=True)
class LogitsProcessor:
    """Traced function of a user, as an engine runs it; equal ones compute the same. A pickled one has no
    `call`: it is part of a stored program's tree."""

    name: str
    defaults: tuple[tuple[str, Any], ...]  # defaults of the knobs by name; a sequence is a tuple
    digest: str  # hash of the trace and its constants
    call: Callable[..., Float[Array, " V"]] = field(compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"call": None}

    def knob_values(self, extra: Mapping[str, KnobValue]) -> ProcessorKnobs:
        """Return a request's knobs, in numpy. Raises ValueError or TypeError for a value that its knob cannot
        have. A processor without knobs runs for every request."""
        is_active = not self.defaults or any(name in extra for name, _ in self.defaults)
        values = {
            name: knob_array(name, extra.get(name, default), default) for name, default in self.defaults
        }
        return ProcessorKnobs(np.bool_(is_active), values)


def processor_knobs(
    processors: Sequence[LogitsProcessor], extra: Mapping[str, KnobValue]
) -> tuple[ProcessorKnobs, ...]:
    """Return a request's knobs for each processor. Raises ValueError or TypeError for a name or a value that
    is not allowed."""
    names = sorted({name for p in processors for name, _ in p.defaults})
    for name in extra:
        if not names:
            raise ValueError(f"extra_args={quote(dict(extra))} is not allowed: no logits processor has knobs")
        if name not in names:
            raise ValueError(f"extra_args: {unknown_name_message('name', name, names)}")
    return tuple(p.knob_values(extra) for p in processors)


def has_active_processor(processors: Sequence[LogitsProcessor], extra: Mapping[str, KnobValue]) -> bool:
    """True if one of the processors changes a request's logits."""
    return any(p.knob_values(extra).is_active for p in processors)


def knob_array(name: str, value: Any, default: Any) -> Any:
    """Convert a value to its knob's array. A shorter list is filled up from the default."""
    is_list, what = isinstance(default, tuple), f"extra_args[{name!r}]={quote(value)} is not allowed"
    if not is_list:
        return knob_number(what, value, type(default))
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) > len(default):
        raise ValueError(f"{what}: a list of at most {len(default)}")
    values = [*value, *default[len(value) :]]
    return np.array([knob_number(what, x, type(number)) for x, number in zip(values, default, strict=True)])


def knob_number(what: str, value: Any, kind: type) -> Any:
    """Convert a number to its type on the device. Raises ValueError for a number of another type or size."""
    ok = type(value) is kind or (kind is float and type(value) is int)
    limits = np.finfo(np.float32) if kind is float else np.iinfo(np.int32)
    if not ok or not (kind is bool or limits.min <= value <= limits.max):
        raise ValueError(f"{what}: {'true or false' if kind is bool else DEVICE_TYPES[kind].__name__}")
    return DEVICE_TYPES[kind](value)


# ---------------------------------------------------------------- from a function to a processor


def list_function_names(functions: Sequence[Any] | None) -> list[str]:
    """Return the names of functions: module and qualified name."""
    return [qualify_function(resolve_function(x)) for x in functions or ()]


def qualify_function(function: Callable[..., Any]) -> str:
    """Return the name of a function, as "module:name"."""
    plain = inspect.unwrap(function)
    return f"{plain.__module__}:{plain.__qualname__}"


def hash_functions(functions: Sequence[Any] | None, V: int, S: int) -> list[str]:
    """Return the names of functions, each with a hash of its knobs and its trace. The vocabulary has V
    tokens, a sequence at most S.

    The trace has every value that the function is bound to, wherever it is defined. Raises TypeError or
    ValueError for a function that cannot be traced. `trace_processors` checks that it is pure.
    """
    computations = []
    for function in map(resolve_function, functions or ()):
        _, processor = trace_processor(function, V, S)
        hashed = sha256(repr((processor.defaults, processor.digest)).encode())
        computations.append(f"{qualify_function(function)} {hashed.hexdigest()}")
    return computations


def trace_processors(functions: Sequence[Any] | None, V: int, S: int) -> tuple[LogitsProcessor, ...]:
    """Trace and probe functions, given as such or by name, for a vocabulary of V and sequences of at most S
    tokens. Raises TypeError or ValueError that names the function and the error."""
    return tuple(trace_pure_processor(resolve_function(x), V, S) for x in functions or ())


def resolve_function(source: Any) -> Callable[..., Any]:
    """Return a function, or import the one that "module:name" names. Raises TypeError or ValueError for
    anything else."""
    if isinstance(source, str):
        module, _, path = source.partition(":")
        if not (module and path):
            raise ValueError(f"logits_processors has {source!r}: a function, or its name as module:function")
        try:
            source = attrgetter(path)(import_module(module))
        except (ImportError, AttributeError) as error:
            raise ValueError(f"logits_processors has {source!r}: {error}") from None
    if not callable(source) or inspect.ismethod(source) or not inspect.isfunction(inspect.unwrap(source)):
        raise TypeError(
            f"logits_processors has {quote(source)}: a function (logits, history, knobs) -> logits; numbers "
            "that a partial, a method or an object would hold are knobs of @logits_processor"
        )
    return source


def trace_pure_processor(function: Callable[..., Any], V: int, S: int) -> LogitsProcessor:
    """Trace a function twice, probe it, and return its processor. Raises ValueError if the traces differ."""
    (inputs, processor), (_, again) = (trace_processor(function, V, S) for _ in range(2))
    if processor.digest != again.digest:
        raise ValueError(
            f"logits processor {processor.name} is not pure: two traces of it compute different things"
        )
    probe_processor(processor, inputs)
    return processor


def trace_processor(function: Callable[..., Any], V: int, S: int) -> tuple[tuple[Any, ...], LogitsProcessor]:
    """Trace a function. Returns the inputs of the trace, and the processor."""
    name = getattr(function, "__qualname__", type(function).__name__)
    defaults = tuple((k, knob_default(name, k, v)) for k, v in getattr(function, KNOBS_ATTRIBUTE, {}).items())
    inputs = jnp.zeros(V, jnp.float32), empty_history(V, S), {k: knob_array(k, v, v) for k, v in defaults}
    call, digest = trace_function(name, function, inputs)
    return inputs, LogitsProcessor(name, defaults, digest, call)


def knob_default(processor: str, name: str, value: Any) -> Any:
    """Convert a knob's default to a number or a tuple of numbers. Raises TypeError for anything else."""
    default = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
    default = tuple(default) if isinstance(default, list) else default
    parts = default if isinstance(default, tuple) else (default,)
    if not parts or any(type(x) is not type(parts[0]) or type(x) not in DEVICE_TYPES for x in parts):
        raise TypeError(
            f"logits processor {processor}: {name}={quote(value)} is no default of a knob: a bool, an int or "
            "a float, or a sequence of one of them"
        )
    return default


def empty_history(V: int, S: int) -> History:
    """Return the history of a row without tokens."""
    zero = jnp.int32(0)
    return History(jnp.full(S, -1, jnp.int32), zero, zero, jnp.zeros(V, jnp.int32), jnp.zeros(V, bool))


def trace_function(
    name: str, function: Callable[..., Any], inputs: tuple[Any, ...]
) -> tuple[Callable[..., Any], str]:
    """Trace a function. Returns the trace as a function, and a hash of all that it computes, constants
    included. Raises ValueError for effects, and for outputs of another shape than the logits."""
    leaves, structure = jax.tree.flatten(inputs)
    closed, out = jax.make_jaxpr(
        lambda *flat: function(*jax.tree.unflatten(structure, flat)), return_shape=True
    )(*leaves)
    if effects := sorted(find_effects(closed.jaxpr)):
        raise ValueError(f"logits processor {name} is not pure: it has {', '.join(effects)}")
    wanted = [(x.shape, x.dtype) for x in leaves[:1]]
    if (returned := [(x.shape, x.dtype) for x in jax.tree.leaves(out)]) != wanted:
        kinds = " and ".join(f"{dtype} {list(shape)}" for shape, dtype in returned) or "nothing"
        raise ValueError(f"logits processor {name} returns {kinds}: float32 {list(wanted[0][0])}")
    flat = jax.extend.core.jaxpr_as_fun(closed)
    hashed = sha256(jax.jit(lambda *x: flat(*x)).lower(*leaves).as_text().encode())
    # jax makes some constants arguments, so the text lacks them
    for constant in (*closed.consts, *iter_constants(closed.jaxpr)):
        hashed.update(dump_constant(constant))
    return lambda *args: flat(*jax.tree.leaves(args))[0], hashed.hexdigest()[:32]


def iter_constants(jaxpr: Any) -> Iterator[Any]:
    """Yield the arrays and numbers in a trace, and in its inner traces."""
    for equation in jaxpr.eqns:
        yield from (x.val for x in equation.invars if isinstance(x, jax.extend.core.Literal))
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=is_closed_jaxpr):
            if is_closed_jaxpr(value):
                yield from value.consts
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from iter_constants(inner)


def dump_constant(constant: Any) -> bytes:
    """Return the bytes of an array or a number in a trace. Of random keys, return the bytes of their data."""
    is_key = jnp.issubdtype(getattr(constant, "dtype", np.int32), jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(constant) if is_key else constant).tobytes()


def is_closed_jaxpr(x: Any) -> bool:
    """True for a trace with its constants (ClosedJaxpr)."""
    return hasattr(x, "jaxpr") and hasattr(x, "consts")


def find_effects(jaxpr: Any) -> set[str]:
    """Return the primitives of a trace that have effects: callbacks, prints, writes to references."""
    effects = set()
    for equation in jaxpr.eqns:
        inner = list(jax.extend.core.jaxprs_in_params(equation.params))
        for inner_jaxpr in inner:
            effects |= find_effects(inner_jaxpr)
        if not inner and (equation.effects or "callback" in equation.primitive.name):
            effects.add(equation.primitive.name)
    return effects


def probe_processor(processor: LogitsProcessor, inputs: tuple[Any, ...]) -> None:
    """Run a processor on rows of random logits and tokens, with its knobs' defaults and with other numbers.
    The last row has no tokens. Raises ValueError for NaN with the defaults. Raises it too for a row whose
    bits change with the run or with the number of rows."""
    rng, (V,), (S,) = np.random.default_rng(0), inputs[0].shape, inputs[1].tokens.shape
    logits, history = rng.normal(0, 4, (PROBE_ROWS, V)).astype(np.float32), random_histories(rng, V, S)
    plain = {name: np.broadcast_to(x, (PROBE_ROWS, *np.shape(x))) for name, x in inputs[2].items()}
    others = {name: random_knob_values(rng, x, V) for name, x in plain.items()}
    run = jax.jit(jax.vmap(processor.call))
    if np.isnan(np.asarray(run(logits, history, plain))).any():
        raise ValueError(f"logits processor {processor.name} returns NaN for finite logits")
    for knobs in (plain, others) if plain else (plain,):
        check_row_independence(processor.name, run, (logits, history, knobs))


def random_histories(rng: np.random.Generator, V: int, S: int) -> History:
    """Return the histories of `PROBE_ROWS` rows, the longest first, the last without tokens. Half of a row's
    tokens are its prompt."""
    tokens = rng.integers(0, V, (PROBE_ROWS, S), dtype=np.int32)
    lengths = (np.arange(PROBE_ROWS, dtype=np.int32)[::-1] * (S - 1)) // PROBE_ROWS
    counts, in_prompt = np.zeros((PROBE_ROWS, V), np.int32), np.zeros((PROBE_ROWS, V), bool)
    for row, length in enumerate(lengths):
        in_prompt[row, tokens[row, : length // 2]] = True
        np.add.at(counts[row], tokens[row, length // 2 : length], 1)
    tokens = np.where(np.arange(S) < lengths[:, None], tokens, -1).astype(np.int32)
    return History(tokens, lengths, lengths // 2, counts, in_prompt)


def random_knob_values(
    rng: np.random.Generator, default: Shaped[np.ndarray, "B *numbers"], V: int
) -> Shaped[np.ndarray, "B *numbers"]:
    """Return random numbers for a knob of `PROBE_ROWS` rows. Half of the integers are small, the others are
    token ids."""
    if default.dtype == np.float32:
        return rng.exponential(1.0, default.shape).astype(np.float32)
    small = rng.integers(0, 8, default.shape, dtype=np.int32)
    numbers = np.where(rng.random(default.shape) < 0.5, small, rng.integers(0, V, default.shape))
    return (numbers % 2 == 0) if default.dtype == bool else numbers.astype(np.int32)


def check_row_independence(name: str, run: Callable[..., Any], batch: tuple[Any, ...]) -> None:
    """Raise ValueError if rows have other bits in a second run, or each alone."""
    bits, bits_again = (np.asarray(run(*batch)).tobytes() for _ in range(2))
    alone = [run(*jax.tree.map(lambda x, i=i: x[i : i + 1], batch)) for i in range(PROBE_ROWS)]
    if bits != bits_again:
        raise ValueError(f"logits processor {name} is not pure: two runs have other bits")
    if bits != np.concatenate(alone).tobytes():
        raise ValueError(
            f"logits processor {name} gives a row other bits alone than in a batch: add up with "
            "duetto.sampling.search.pairwise_sum, whose order no batch changes"
        )
