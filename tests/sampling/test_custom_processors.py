"""Logits processors of users: what is refused, what a row's knobs are, and what a row without them keeps."""

import functools
import inspect
import itertools
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.processors import NONE, PROCESSORS
from cases.programs import StoredJit
from cases.sampling import admit_jit, commit_jit, load_jit, sample_jit
from suite.marks import full_if

from duetto import SamplingParams, logits_processor
from duetto.sampling import sample
from duetto.sampling.accept import target_probs
from duetto.sampling.custom_processors import (
    empty_history,
    hash_functions,
    list_function_names,
    processor_knobs,
    trace_processors,
)
from duetto.sampling.params import NAN_TOKEN, request_knobs
from duetto.sampling.search import pairwise_sum
from duetto.sampling.state import dense_bias, empty_sampling_state, needs_history

V, S, SLOTS = 40, 32, 4
PROMPT, OUTPUT = [2, 5, 5, 7], [4, 6, 4]
COUNTER = itertools.count()
target_jit = StoredJit(target_probs)


def prints(logits, history, knobs):
    jax.debug.print("{}", logits[0])
    return logits


def calls_back(logits, history, knobs):
    own = jax.jit(lambda x: jax.pure_callback(np.copy, jax.ShapeDtypeStruct(x.shape, x.dtype), x))
    return own(logits)


def counts(logits, history, knobs):
    return logits + float(next(COUNTER))


def softmax(logits, history, knobs):
    return logits - jnp.log(pairwise_sum(jnp.exp(logits)[None])[0])


class Scaled:
    def __init__(self, by):
        self.by = by

    def __call__(self, logits, history, knobs):
        return logits * self.by

    apply = __call__


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (prints, "logits processor prints is not pure: it has debug_(print|callback)"),
        (calls_back, "logits processor calls_back is not pure: it has pure_callback"),
        (counts, "logits processor counts is not pure: two traces"),
        (lambda x, *_: x[1:], r"returns float32 \[39\]: float32 \[40\]"),
        (lambda x, *_: x.astype(jnp.bfloat16), r"returns bfloat16 \[40\]: float32 \[40\]"),
        (lambda x, *_: (x, x), r"returns float32 \[40\] and float32 \[40\]: float32"),
        (lambda x, *_: None, "returns nothing: float32"),
        (lambda x, *_: jnp.log(-jnp.abs(x)), "returns NaN"),
        ("no_colon", "module:function"),
        ("cases.processors:missing", "has no attribute 'missing'"),
        ("no_module:f", "No module named 'no_module'"),
        (dict, "a function .logits, history, knobs. -> logits"),
        (3, "a function"),
        (
            functools.partial(counts, 2),
            "a partial, a method or an object would hold are knobs of @logits_proc",
        ),
        (Scaled(2.0), "knobs of @logits_processor"),
        (Scaled(2.0).apply, "knobs of @logits_processor"),
        (jax.jit(functools.partial(counts, 2)), "knobs of @logits_processor"),
        (abs, "knobs of @logits_processor"),
    ],
)
def test_what_is_not_pure_or_no_function_is_refused(given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        trace_processors([given], V, S)


def test_an_effect_inside_a_loop_is_found():
    def looped(logits, history, knobs):
        return jax.lax.fori_loop(0, 2, lambda _, x: prints(x, None, None), logits)

    with pytest.raises(ValueError, match="is not pure: it has debug_"):
        trace_processors([looped], V, S)


@pytest.mark.parametrize("wrong", [None, "a", (), [1, 2.0], [[1]], {}])
@pytest.mark.usefixtures("unchecked")
def test_a_default_is_a_number_or_several_of_one_kind(wrong):
    own = logits_processor(x=wrong)(lambda logits, history, knobs: logits)
    with pytest.raises(TypeError, match="x=.* is no default of a knob"):
        trace_processors([own], V, S)


def boosting(constant, by):
    return logits_processor(boost=by)(lambda logits, history, knobs: logits.at[3].add(constant))


def test_processors_are_equal_where_they_compute_the_same():
    one, same, other = (trace_processors([boosting(c, 0.0)], V, S) for c in (1.0, 1.0, 2.0))
    assert one == same != other and hash(one) == hash(same)
    trees = [
        str(jax.tree.structure(empty_sampling_state(1, V, processors=p, S=S))) for p in (one, same, other)
    ]
    assert trees[0] == trees[1] != trees[2], "kept programs are found by it"
    assert one != trace_processors([boosting(1.0, 0.5)], V, S), "a default is part of it"
    assert pickle.loads(pickle.dumps(one)) == one, "stored programs hold it"


@full_if(lambda library, as_arguments: as_arguments != (library is np))
@pytest.mark.parametrize("library", [np, jnp])
@pytest.mark.parametrize("as_arguments", [False, True])
def test_constants_are_part_of_what_is_equal(library, as_arguments, monkeypatch):
    """Also where the text of a program has none of them, as if jax made them arguments."""
    if as_arguments:
        monkeypatch.setattr(jax.stages.Lowered, "as_text", lambda *_: "")

    def digest(table):
        inner = jax.jit(lambda x: x + table)
        looped = lambda x, *_: jax.lax.fori_loop(0, 2, lambda _, y: inner(y), x)
        return trace_processors([looped], V, S)[0].digest

    one, other = (library.arange(V, dtype="float32") * by for by in (1, 2))
    assert digest(one) == digest(one) != digest(other)
    name = "jax_use_simplified_jaxpr_constants"
    if name in jax.config.values:
        before = jax.config.values[name]
        try:
            jax.config.update(name, True)
            assert digest(one) == digest(one) != digest(other)
        finally:
            jax.config.update(name, before)


def test_a_traced_processor_keeps_the_constants_of_its_trace():
    constants = [1.0]
    (own,) = trace_processors([lambda logits, history, knobs: logits + constants[0]], V, S)
    constants[0] = 5.0
    assert float(own.call(jnp.zeros(V), *inputs())[0]) == 1.0


def inputs():
    return empty_history(V, S), {}


CONSTANT, NUMBERS = 1.0, {"list": [1.0]}


def scaled(logits):
    return logits * CONSTANT


class Held:
    def __init__(self, by):
        self.by = by

    def scale(self, logits):
        return logits * self.by


@dataclass(frozen=True)
class Weights:
    by: float


def by_default(by):
    def own(logits, history, knobs, by=by):
        return logits * by

    return own


def by_nested(by):
    inner = lambda logits: logits * by
    middle = lambda logits: inner(logits)
    return lambda logits, history, knobs: middle(logits)


def bound_to(hold, work):
    """Return what makes a function of the logits and of what holds a number."""

    def make(by):
        held = hold(by)
        return lambda logits, history, knobs: work(logits, held)

    return make


BOUND = {
    "a number": bound_to(float, lambda logits, held: logits * held),
    "a default": by_default,
    "a list": bound_to(lambda by: [by], lambda logits, held: logits * held[0]),
    "a mapping": bound_to(lambda by: {"a": by}, lambda logits, held: logits * held["a"]),
    "a set": bound_to(lambda by: {by}, lambda logits, held: logits * max(held)),
    "an object": bound_to(Held, lambda logits, held: logits * held.by),
    "a record": bound_to(Weights, lambda logits, held: logits * held.by),
    "a method": bound_to(lambda by: Held(by).scale, lambda logits, held: held(logits)),
    "a partial": bound_to(lambda by: functools.partial(jnp.multiply, by), lambda logits, held: held(logits)),
    "a nested function": by_nested,
    "a large array": bound_to(
        lambda by: np.append(np.zeros(99_999, np.float32), np.float32(by)),
        lambda logits, held: logits + held[-V:],
    ),
    "an array of jax": bound_to(jnp.float32, lambda logits, held: logits * held),
    "random keys": bound_to(
        lambda by: jax.random.key(int(by)),
        lambda logits, held: logits + jax.random.bits(held, (V,)).astype(jnp.float32),
    ),
    "a wrapped function": lambda by: jax.jit(lambda logits, history, knobs: logits * by),
    "a knob's default": lambda by: logits_processor(boost=by)(lambda logits, history, knobs: logits),
}


@pytest.mark.parametrize("make", BOUND.values(), ids=BOUND)
def test_a_computation_has_all_that_its_function_is_bound_to(make):
    """Functions of one file and one name that compute different things."""
    one, same, other = (hash_functions([make(by)], V, S) for by in (1.0, 1.0, 2.0))
    assert one == same != other


def test_a_computation_is_traced_once():
    """An engine's start, which traces it again, finds whether it is pure."""
    traces = []

    def own(logits, history, knobs):
        traces.append(logits)
        return logits

    hash_functions([own], V, S)
    assert len(traces) == 1


GLOBALS = {
    "a constant": lambda by, change: change(globals(), "CONSTANT", by),
    "an entry": lambda by, change: change(NUMBERS, "list", [by]),
    "a constant of another module": lambda by, change: change(vars(jnp), "pi", by),
}


@pytest.mark.parametrize("name", GLOBALS)
def test_a_computation_has_the_globals_that_it_reads(name, monkeypatch):
    def own(logits, history, knobs):
        return scaled(logits) * NUMBERS["list"][0] + jnp.pi

    found = []
    for by in (1.0, 1.0, 2.0):
        GLOBALS[name](by, monkeypatch.setitem)
        found += hash_functions([own], V, S)
    assert found[0] == found[1] != found[2]


def test_a_computation_is_the_same_in_another_process():
    asked = "cases.processors:ban_at_first"
    code = "from duetto.sampling.custom_processors import hash_functions"
    code += f"; print(hash_functions([{asked!r}], {V}, {S})[0])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "7"}
    told = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert told.stdout.strip() == hash_functions([asked], V, S)[0], told.stderr
    assert list_function_names([asked]) == ["logits_processors:ban_at_first"] == [told.stdout.split()[0]]


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (lambda own: jnp.where(own.x > 0, own.logits.sum(), 0.0), "other bits alone than in a batch"),
        (lambda own: jnp.where(own.seen, own.logits.sum(), 0.0), "other bits alone than in a batch"),
        (lambda own: jnp.where(own.seen, jnp.nan, 0.0), "returns NaN"),
    ],
    ids=["with another number", "with a history", "NaN with a history"],
)
def test_faults_that_only_requests_would_show_fail_the_start(bad, what):
    """With defaults and without tokens these functions change nothing."""

    @logits_processor(x=0.0)
    def own(logits, history, knobs):
        seen = jnp.any(history.output_counts > 0) & jnp.any(history.in_prompt)
        return logits + bad(SimpleNamespace(x=knobs["x"], logits=logits, seen=seen))

    with pytest.raises(ValueError, match=what):
        trace_processors([own], 4001, S)


def test_the_stages_are_made_once_for_all_functions(monkeypatch):
    made, pipeline = [], sample.sampling_stages
    monkeypatch.setattr(sample, "sampling_stages", lambda state: made.append(state) or pipeline(state))

    def edited(logits, position, slot, live, state):
        rows = sample.gather_sampling_rows(position, slot, live, state)
        return sample.apply_stages(
            logits, rows, sample.find_rows_by_stage(rows), sample.edit_stage_names(state)
        )

    jax.eval_shape(edited, *Rows([None]).arguments(falling(3)[None]))
    assert len(made) == 2, "once for who wants them, once for what they change"


# ---------------------------------------------------------------- a request's numbers


def test_shorter_lists_are_filled_up_and_kinds_are_the_defaults():
    processors = bound(*PROCESSORS)
    ban, ngram, _ = processor_knobs(processors, {"banned": [3, 9], "ngram_size": 2})
    assert ban.values["banned"].tolist() == [3, 9] + [NONE] * 14 and ban.values["banned"].dtype == np.int32
    assert ban.is_active and ngram.is_active and int(ngram.values["ngram_size"]) == 2
    assert not any(own.is_active for own in processor_knobs(processors, {}))
    (always,) = trace_processors([softmax], V, S)
    assert always.knob_values({}).is_active, "without knobs every request is processed"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"bannd": [1]}, "extra_args: unknown name 'bannd', did you mean 'banned'"),
        ({"ngram_size": 2.0}, r"extra_args\['ngram_size'\]=2.0 is not allowed: int32"),
        ({"ngram_size": True}, "int32"),
        ({"ngram_size": 2**31}, "int32"),
        ({"ngram_size": [1]}, "int32"),
        ({"banned": [0] * 17}, "a list of at most 16"),
        ({"banned": 3}, "a list of at most 16"),
        ({"banned": [1.5]}, "int32"),
    ],
)
def test_a_wrong_number_is_refused(extra, message):
    with pytest.raises(ValueError, match=message):
        processor_knobs(bound(*PROCESSORS), SamplingParams(extra_args=extra).extra_args)


def test_without_processors_extra_arguments_are_refused():
    with pytest.raises(ValueError, match="extra_args=.*no logits processor has knobs"):
        processor_knobs((), {"a": 1})
    assert SamplingParams(extra_args={}) == SamplingParams(), "neutral, as a script for vLLM may give it"
    with pytest.raises(TypeError, match="extra_args"):
        SamplingParams(extra_args={"a": "text"})
    assert SamplingParams(extra_args={"a": np.arange(2)}).extra_args == {"a": [0, 1]}


# ---------------------------------------------------------------- in a batch


@functools.cache
def bound(*functions):
    return trace_processors(functions, V, S)


class Rows:
    """Requests with a prompt and an output, each in a slot of its own. Other slots are empty: tests share
    programs."""

    def __init__(self, given, processors=PROCESSORS, slots=SLOTS, **more):
        self.processors, self.slots = bound(*processors), slots
        self.state = empty_sampling_state(slots, V, processors=self.processors, S=S)
        for slot, extra in enumerate(given):
            self.enter(slot, SamplingParams(**{"temperature": 0, "extra_args": extra} | more))

    def enter(self, slot, params):
        knobs = request_knobs(
            params, seed=5, stop_ids=(1,), prompt_len=len(PROMPT), processors=self.processors
        )
        self.state = admit_jit(self.state, np.int32(slot), knobs)
        if needs_history(params, self.processors):
            tokens = np.resize(np.array([*PROMPT, *OUTPUT], np.int32), S)
            lengths = np.int32(len(PROMPT)), np.int32(len(PROMPT) + len(OUTPUT))
            self.state = load_jit(self.state, np.int32(slot), tokens, *lengths, dense_bias(params, V))

    def arguments(self, logits):
        every = np.arange(self.slots, dtype=np.int32)
        padded = np.zeros((self.slots, V), np.float32)
        padded[: len(logits)] = logits
        position = np.full(self.slots, len(PROMPT) + len(OUTPUT), np.int32)
        return padded, position, every, every < len(logits), self.state

    def sample(self, logits):
        return np.asarray(sample_jit(*self.arguments(logits)).token)[: len(logits)]

    def commit(self, tokens):
        every = np.arange(self.slots, dtype=np.int32)
        self.state = commit_jit(
            self.state, every, np.resize(np.int32(tokens), self.slots), every < len(tokens)
        )


def falling(*first):
    """Logits whose largest are these tokens, in this order."""
    logits = np.linspace(-1, -2, V, dtype=np.float32)
    logits[list(first)] = np.linspace(9, 8, len(first))
    return logits


def test_tokens_are_banned_in_the_first_steps():
    rows = Rows([None, {"banned": [8, 9], "banned_steps": 4}, {"banned": [8, 9], "banned_steps": 3}])
    assert rows.sample(np.stack([falling(8, 9, 10)] * 3)).tolist() == [8, 10, 8]
    rows.commit([8, 10, 8])
    assert rows.sample(np.stack([falling(8, 9, 10)] * 3)).tolist() == [8, 8, 8]


def test_no_ngram_is_repeated():
    """After 2 5 5 7 4 6 4 comes no 6, of two tokens, and of one nothing that was there."""
    rows = Rows([None, {"ngram_size": 2}, {"ngram_size": 1}, {"ngram_size": 3}])
    assert rows.sample(np.stack([falling(6, 5, 12)] * 4)).tolist() == [6, 5, 12, 6]
    rows.commit([6, 5, 12, 6])  # 4 6 4 6: of three tokens no 4 follows
    assert rows.sample(np.stack([falling(4, 5, 3)] * 4)).tolist() == [4, 4, 3, 5]


def test_the_reasoning_ends_within_its_budget():
    rows = Rows([{"thinking_budget": n, "thinking_end": 20} for n in (3, 4)])
    assert rows.sample(np.stack([falling(8)] * 2)).tolist() == [20, 8]
    rows.commit([20, 8])
    assert rows.sample(np.stack([falling(8)] * 2)).tolist() == [8, 20]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_row_that_does_not_ask_keeps_its_bits(temperature):
    logits = np.random.default_rng(0).normal(0, 3, (4, V)).astype(np.float32)
    extra = [{"ngram_size": 1}, None, {"banned": [1, 2], "banned_steps": 9}, None]
    own, plain = Rows(extra, temperature=temperature), Rows([None] * 4, (), temperature=temperature)
    found, wanted = (np.asarray(target_jit(*rows.arguments(logits))) for rows in (own, plain))
    assert found[[1, 3]].tobytes() == wanted[[1, 3]].tobytes()
    assert own.sample(logits)[[1, 3]].tolist() == plain.sample(logits)[[1, 3]].tolist()
    for i in range(4):
        alone = Rows(extra[i : i + 1], slots=1, temperature=temperature)
        assert (
            np.asarray(target_jit(*alone.arguments(logits[i : i + 1]))).tobytes()
            == found[i : i + 1].tobytes()
        )


def test_banned_tokens_are_never_accepted_as_drafts():
    """Rejection's target is what is sampled from: it has no weight on them."""
    rows = Rows([{"banned": [8, 9], "banned_steps": 9}], temperature=1.0)
    p = np.asarray(target_jit(*rows.arguments(falling(8, 9, 10)[None])))[0]
    assert p[8] == p[9] == 0 and p[10] > 0.9


def test_a_ban_does_not_hide_nan_of_the_model():
    rows = Rows([{"banned": [8], "banned_steps": 9}] * 2)
    logits = np.stack([falling(8, 9)] * 2)
    logits[0, 8] = np.nan
    assert rows.sample(logits).tolist() == [NAN_TOKEN, 9]


VALUES = np.inf, 3e38, -np.inf


@logits_processor(which=0)
def overwritten(logits, history, knobs):
    return logits.at[:20].set(jnp.array(VALUES, jnp.float32)[knobs["which"]])


@logits_processor(forced=0)
def alone(logits, history, knobs):
    return jnp.where(jnp.arange(V) == knobs["forced"], 0.0, -jnp.inf)


def test_no_number_outweighs_a_mask():
    """A function may return anything: tokens that are not allowed stay out, the others are drawn from."""
    asked = [{"which": i} for i in range(len(VALUES))] + [{"forced": 7}]
    rows = Rows(asked, [overwritten, alone], allowed_token_ids=[3, 30], min_tokens=9)
    *found, forced = rows.sample(np.stack([falling(5, 30)] * 4)).tolist()
    assert found == [3 if value > 0 else 30 for value in VALUES] and forced in (3, 30)


def test_row_sums_in_a_fixed_order_pass_the_probe():
    (own,) = trace_processors([softmax], V, S)
    x = jnp.asarray(falling(3))
    assert abs(float(jnp.sum(jnp.exp(own.call(x, *inputs())))) - 1) < 1e-5


def test_the_page_has_the_functions_of_the_example():
    page = (Path(__file__).resolve().parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
    assert all(inspect.getsource(function) in page for function in PROCESSORS)
