"""Logits processors of users: what is refused, what a row's knobs are, and what a row without them keeps."""

import functools
import inspect
import itertools
import pickle
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.processors import NONE, PROCESSORS
from cases.programs import StoredJit
from cases.sampling import admit_jit, commit_jit, load_jit, sample_jit

from duetto import SamplingParams, logits_processor
from duetto.sampling import sample
from duetto.sampling.accept import target_probs
from duetto.sampling.custom import empty_history, knobs_of, processors_of, sources_of
from duetto.sampling.params import knobs_row
from duetto.sampling.search import pairwise_sum
from duetto.sampling.state import dense_bias, empty_state, needs_history

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
        processors_of([given], V, S)


def test_an_effect_inside_a_loop_is_found():
    def looped(logits, history, knobs):
        return jax.lax.fori_loop(0, 2, lambda _, x: prints(x, None, None), logits)

    with pytest.raises(ValueError, match="is not pure: it has debug_"):
        processors_of([looped], V, S)


@pytest.mark.parametrize("wrong", [None, "a", (), [1, 2.0], [[1]], {}])
@pytest.mark.usefixtures("unchecked")
def test_a_default_is_a_number_or_several_of_one_kind(wrong):
    own = logits_processor(x=wrong)(lambda logits, history, knobs: logits)
    with pytest.raises(TypeError, match="x=.* is no default of a knob"):
        processors_of([own], V, S)


def boosting(constant, by):
    return logits_processor(boost=by)(lambda logits, history, knobs: logits.at[3].add(constant))


def test_processors_are_equal_where_they_compute_the_same():
    one, same, other = (processors_of([boosting(c, 0.0)], V, S) for c in (1.0, 1.0, 2.0))
    assert one == same != other and hash(one) == hash(same)
    trees = [str(jax.tree.structure(empty_state(1, V, processors=p, S=S))) for p in (one, same, other)]
    assert trees[0] == trees[1] != trees[2], "kept programs are found by it"
    assert one != processors_of([boosting(1.0, 0.5)], V, S), "a default is part of it"
    assert pickle.loads(pickle.dumps(one)) == one, "stored programs hold it"


@pytest.mark.parametrize("library", [np, jnp])
@pytest.mark.parametrize("as_arguments", [False, True])
def test_constants_are_part_of_what_is_equal(library, as_arguments, monkeypatch):
    """Also where the text of a program has none of them, as if jax made them arguments."""
    if as_arguments:
        monkeypatch.setattr(jax.stages.Lowered, "as_text", lambda *_: "")

    def digest(table):
        inner = jax.jit(lambda x: x + table)
        looped = lambda x, *_: jax.lax.fori_loop(0, 2, lambda _, y: inner(y), x)
        return processors_of([looped], V, S)[0].digest

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


def test_the_trace_outlives_a_change_of_what_it_was_made_of():
    constants = [1.0]
    (own,) = processors_of([lambda logits, history, knobs: logits + constants[0]], V, S)
    constants[0] = 5.0
    assert float(own.call(jnp.zeros(V), *inputs())[0]) == 1.0


def inputs():
    return empty_history(V, S), {}


def test_sources_name_the_file():
    ban, own = sources_of(["cases.processors:ban_at_first", counts])
    assert ban.startswith("logits_processors:ban_at_first ") and ":counts " in own
    assert ban.split()[1] != own.split()[1]
    assert sources_of([jax.jit(softmax)])[0].startswith(sources_of([softmax])[0].split()[0])


def test_sources_have_what_a_function_is_bound_to():
    """Functions of one file, and one name, that compute different things."""
    makers = [
        boosting,
        lambda c, by: lambda logits, history, knobs, c=c: logits * c + by,
        lambda c, by: jax.jit(boosting(c, by)),
        lambda c, by: boosting(np.arange(3) * c, by),
        lambda c, by: boosting({"a": [c]}, by),
        lambda c, by: boosting(functools.partial(counts, c), by),
    ]
    for make in makers:
        one, same, other = (sources_of([make(c, 0.0)]) for c in (1.0, 1.0, 2.0))
        assert one == same != other
    assert sources_of([boosting(1.0, 0.0)]) != sources_of([boosting(1.0, 0.5)]), "a default of a knob"


@pytest.mark.parametrize("file", ["<stdin>", "/tmp/ipykernel_0/1.py"])
def test_functions_of_a_prompt_are_known_by_their_code(file):
    def typed(by, globals_=""):
        space = {"__name__": "__main__"}
        text = f"{globals_}\ndef f(logits, history, knobs):\n    return logits * {by}"
        exec(compile(text, file, "exec"), space)  # noqa: S102 - as a prompt does
        return space["f"]

    one, same, other = (sources_of([typed(by)]) for by in (1.0, 1.0, 2.0))
    assert one == same != other and one[0].startswith("__main__:f ")
    assert sources_of([typed("K", "K = 1.0")]) != sources_of([typed("K", "K = 2.0")])
    assert processors_of([typed(2.0)], V, S)[0].name == "f"


def test_the_stages_are_made_once_for_all_functions(monkeypatch):
    made, pipeline = [], sample.pipeline
    monkeypatch.setattr(sample, "pipeline", lambda state: made.append(state) or pipeline(state))

    def edited(logits, position, slot, live, state):
        rows = sample.rows_of(position, slot, live, state)
        return sample.in_turn(logits, rows, sample.who_wants(rows), sample.edits(state))

    jax.eval_shape(edited, *Rows([None]).arguments(falling(3)[None]))
    assert len(made) == 2, "once for who wants them, once for what they change"


# ---------------------------------------------------------------- a request's numbers


def test_shorter_lists_are_filled_up_and_kinds_are_the_defaults():
    processors = bound(*PROCESSORS)
    ban, ngram, _ = knobs_of(processors, {"banned": [3, 9], "ngram_size": 2})
    assert ban.values["banned"].tolist() == [3, 9] + [NONE] * 14 and ban.values["banned"].dtype == np.int32
    assert ban.asked and ngram.asked and int(ngram.values["ngram_size"]) == 2
    assert not any(own.asked for own in knobs_of(processors, {}))
    (always,) = processors_of([softmax], V, S)
    assert always.row({}).asked, "without knobs every request is processed"


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
        knobs_of(bound(*PROCESSORS), SamplingParams(extra_args=extra).extra_args)


def test_without_processors_extra_arguments_are_refused():
    with pytest.raises(ValueError, match="extra_args=.*no logits processor has knobs"):
        knobs_of((), {"a": 1})
    assert SamplingParams(extra_args={}) == SamplingParams(), "neutral, as a script for vLLM may give it"
    with pytest.raises(TypeError, match="extra_args"):
        SamplingParams(extra_args={"a": "text"})
    assert SamplingParams(extra_args={"a": np.arange(2)}).extra_args == {"a": [0, 1]}


# ---------------------------------------------------------------- in a batch


@functools.cache
def bound(*functions):
    return processors_of(functions, V, S)


class Rows:
    """Requests with a prompt and an output, each in a slot of its own. Other slots are empty: tests share
    programs."""

    def __init__(self, given, processors=PROCESSORS, slots=SLOTS, **more):
        self.processors, self.slots = bound(*processors), slots
        self.state = empty_state(slots, V, processors=self.processors, S=S)
        for slot, extra in enumerate(given):
            self.enter(slot, SamplingParams(**{"temperature": 0, "extra_args": extra} | more))

    def enter(self, slot, params):
        knobs = knobs_row(params, seed=5, stop_ids=(1,), prompt_len=len(PROMPT), processors=self.processors)
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
    (own,) = processors_of([softmax], V, S)
    x = jnp.asarray(falling(3))
    assert abs(float(jnp.sum(jnp.exp(own.call(x, *inputs())))) - 1) < 1e-5


def test_the_page_has_the_functions_of_the_example():
    page = (Path(__file__).resolve().parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
    assert all(inspect.getsource(function) in page for function in PROCESSORS)
