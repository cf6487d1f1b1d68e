"""The one step. Prefill, chunked prefill, decode and verification are this pure function at different [B, T]
shapes.

Programs donate the cache and the slots, so both are updated in place. Nothing here depends on which rows
share a batch.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from ....kvcache.paged import Paged
from ....kvcache.pages import ON_DEVICE, Batch, KVCache, positions
from ....kvcache.states import VerifyAttend, VerifyCache
from ....model.attention import Attend
from ....model.config import ModelConfig
from ....model.layers import apart
from ....model.pooling import Pooled
from ....model.recurrent.kinds import STATE
from ....model.sharding import in_any_shard, on_several_devices
from ....model.transformer import Decoder, Observe, Observed, Recorder, forward, unembed
from ....model.tree import pytree
from ....model.weights.adapted import NO_ADAPTER, with_owners
from ....sampling.accept import NONE_KEPT, DraftTokens, Rule, coupled
from ....sampling.checks import MAX_LOGPROBS
from ....sampling.custom import LogitsProcessor
from ....sampling.params import NO_TOKEN, Knobs
from ....sampling.sample import Sampled, Scores, sample
from ....sampling.state import SamplingState, admit, commit, empty_state, stops
from .places import at_least, place_of_row, row_of_place, rows_of_one
from .scoring import NEVER, prompt_pooled, prompt_scores

FEWEST_LOGITS = 8  # rows of a prefill's last product at least: that of fewer has other bits


@pytree
class Slots:
    """State on the device of each running request between steps, by slot, axis C of capacity."""

    last: Any  # int32 [C], the last token sampled
    live: Any  # bool [C], False once a stop token or the end was reached
    known: Any  # int32 [C], tokens that the host gave: samples for earlier positions are dropped
    end: Any  # int32 [C], tokens that the request may have at most
    scored: Any  # int32 [C], the prompt's position from which on log-probabilities are wanted, NEVER
    adapter: Any  # int32 [C], the place of the request's adapter beside the weights, NO_ADAPTER
    sampling: SamplingState
    hidden: Any = None  # [C,D], from which the last token was sampled; None without a head


@pytree
class StageZeroSlots:
    """Leaves of Slots that the first stage of a pipeline has."""

    last: Any  # int32 [C]
    live: Any  # bool [C]
    end: Any  # int32 [C]
    adapter: Any  # int32 [C]


@pytree
class Seat:
    """First contents of a slot: the scalars of Slots and the request's sampling parameters."""

    known: Any
    end: Any
    scored: Any
    knobs: Knobs
    adapter: Any = NO_ADAPTER


@pytree
class Output:
    """Results of a step for the host: samples [B,steps], NO_TOKEN if none; of prompts scores [B,T] and pooled
    hidden states, else None; the observed values of its tokens, if any are."""

    sampled: Sampled
    prompt: Scores | None
    pooled: Pooled | None = None
    observed: Observed | None = None


def empty_slots(
    capacity: int,
    V: int,
    hidden: jax.ShapeDtypeStruct | None = None,
    n_top: int = MAX_LOGPROBS,
    positions: int = 1,
    processors: tuple[LogitsProcessor, ...] = (),
    S: int = 0,
) -> Slots:
    """Return `capacity` unused slots; `hidden` is the shape of a last hidden state, if one is kept; the
    others as in `empty_state`."""

    def zeros(dtype):
        return jnp.zeros(capacity, dtype)

    return Slots(
        last=zeros(jnp.int32),
        live=zeros(bool),
        known=zeros(jnp.int32),
        end=zeros(jnp.int32),
        scored=zeros(jnp.int32) + NEVER,
        adapter=zeros(jnp.int32) + NO_ADAPTER,
        sampling=empty_state(capacity, V, n_top, positions, processors, S),
        hidden=None if hidden is None else jnp.zeros((capacity, *hidden.shape), hidden.dtype),
    )


def seat(slots: Slots, slot: Int[Array, "*seats"], new: Seat) -> Slots:
    """Assign a slot to a request, or several slots to as many requests."""
    return replace(
        slots,
        last=slots.last.at[slot].set(NO_TOKEN),
        live=slots.live.at[slot].set(True),
        known=slots.known.at[slot].set(new.known),
        end=slots.end.at[slot].set(new.end),
        scored=slots.scored.at[slot].set(new.scored),
        adapter=slots.adapter.at[slot].set(new.adapter),
        sampling=admit(slots.sampling, slot, new.knobs),
    )


def awake(slots: Slots | StageZeroSlots, batch: Batch) -> Batch:
    """Return the batch as the device computes it: stopped slots are empty rows, unknown tokens are the slot's
    last."""
    last, live = slots.last[batch.slot], slots.live[batch.slot]
    tokens = jnp.where(batch.tokens == ON_DEVICE, last[:, None], batch.tokens)
    return replace(batch, tokens=tokens, count=jnp.where(live, batch.count, 0))


def emit(
    slots: Slots,
    batch: Batch,
    token: Int[Array, " B"],
    hidden: Float[Array, "B D"],
    position: Int[Array, " B"],
    wanted: Bool[Array, " B"],
) -> tuple[Slots, Int[Array, " B"]]:
    """Record the token sampled from `hidden` for each row that wants one; returns NO_TOKEN where not."""
    wanted = wanted & (position >= slots.known[batch.slot])
    ended = stops(slots.sampling, batch.slot, token) | (position + 1 >= slots.end[batch.slot])
    where = apart(batch.slot, wanted, slots.live.shape[0])
    slots = replace(
        slots,
        last=slots.last.at[where].set(token, mode="drop", unique_indices=True),
        live=slots.live.at[where].set(~ended, mode="drop", unique_indices=True),
        sampling=commit(slots.sampling, batch.slot, token, wanted),
        hidden=None
        if slots.hidden is None
        else slots.hidden.at[where].set(hidden, mode="drop", unique_indices=True),
    )
    return slots, jnp.where(wanted, token, NO_TOKEN)


def sample_last(
    params: Decoder, config: ModelConfig, slots: Slots, batch: Batch, hidden: Float[Array, "B T D"]
) -> tuple[Slots, Sampled]:
    """Sample after each row's last token, [B,1]."""
    last = jnp.maximum(batch.count - 1, 0)
    rows = jnp.arange(hidden.shape[0], dtype=jnp.int32)
    fewest = FEWEST_LOGITS if hidden.shape[1] > 1 else 1  # decode keeps its width
    position = batch.start + last + 1
    wanted = (batch.count > 0) & (position >= slots.known[batch.slot])
    seats, most = slots.live.shape[0], len(rows)
    # one row of a slot samples at most; of a probe, whose rows have one slot, the last
    if hidden.shape[1] > 1 and most > seats and not on_several_devices(hidden):
        rows = jnp.argsort(wanted, stable=True)[-seats:].astype(jnp.int32)
        last, position, wanted = last[rows], position[rows], wanted[rows]
        batch = replace(batch, slot=batch.slot[rows])
    hidden = hidden[rows, last]
    logits = unembed(params, config, at_least(fewest, hidden))[: len(rows)]
    drawn = sample(logits, position, batch.slot, wanted, slots.sampling)
    slots, token = emit(slots, batch, drawn.token, hidden, position, wanted)
    found = replace(drawn, token=token)
    if most > len(rows):
        found = jax.tree.map(lambda x: spread(x, rows, most), found)
    return slots, jax.tree.map(lambda x: x[:, None], found)


def spread(x: Shaped[Array, "rows *rest"], at: Int[Array, " rows"], B: int) -> Shaped[Array, "B *rest"]:
    """Some rows at their places among B; the others are NO_TOKEN."""
    return jnp.full((B, *x.shape[1:]), NO_TOKEN, x.dtype).at[at].set(x, unique_indices=True)


def in_turn(T: int, more: Any, one: Any, state: Any) -> tuple[Any, Sampled]:
    """`one(i, state) -> state, Sampled [B]` for i = 0, 1, ... while `more(i, state)`; Sampled is [B,T],
    NO_TOKEN where it did not run."""
    _, first = jax.eval_shape(one, jnp.int32(0), state)
    nothing = jax.tree.map(lambda s: jnp.full((s.shape[0], T, *s.shape[1:]), NO_TOKEN, s.dtype), first)

    def body(carry: Any) -> Any:
        i, state, found = carry
        state, new = one(i, state)
        return i + 1, state, jax.tree.map(lambda all, x: all.at[:, i].set(x), found, new)

    def unfinished(carry: Any) -> Bool[Array, ""]:
        return (carry[0] < T) & more(*carry[:2])

    _, state, found = jax.lax.while_loop(unfinished, body, (jnp.int32(0), state, nothing))
    return state, found


def column(x: Shaped[Array, "B T *rest"], i: Int[Array, ""]) -> Shaped[Array, "B *rest"]:
    return jax.lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False)


def accept(
    slots: Slots,
    batch: Batch,
    hidden: Float[Array, "rows D"],
    logits: Float[Array, "rows V"],
    offers: Float[Array, "B T V"] | None,
    rule: Rule,
) -> tuple[Slots, Sampled]:
    """Sample after each token of the rows as long as the samples agree with the draft tokens that follow,
    [B,T].

    hidden, logits: those of `rows_of_one`.
    offers: distributions from which the draft tokens were drawn; None if they were not drawn.
    """
    T, rows = batch.tokens.shape[1], row_of_place(batch)

    def one(
        i: Int[Array, ""], state: tuple[Slots, Bool[Array, " B"]]
    ) -> tuple[tuple[Slots, Bool[Array, " B"]], Sampled]:
        slots, wanted = state
        position, after = batch.start + i + 1, jnp.minimum(i + 1, T - 1)
        probs = None if offers is None else column(offers, after)[:, None]
        guess = DraftTokens(column(batch.tokens, after)[:, None], (i + 1 < batch.count)[:, None], probs)
        row = column(rows, i)
        drawn, kept = rule(logits[row], position, batch.slot, wanted, slots.sampling, guess)
        slots, token = emit(slots, batch, drawn.token, hidden[row], position, wanted)
        return (slots, wanted & (kept != NONE_KEPT) & (token != NO_TOKEN) & slots.live[batch.slot]), replace(
            drawn, token=token
        )

    (slots, _), found = in_turn(T, lambda i, state: jnp.any(state[1]), one, (slots, batch.count > 0))
    return slots, found


def run(
    params: Decoder,
    cache: KVCache,
    slots: Slots,
    batch: Batch,
    config: ModelConfig,
    recorder: Recorder | None = None,
) -> tuple[Float[Array, "B T D"], KVCache]:
    """Run the tokens of every row through the model, and write their keys."""
    return through_model(params, slots, batch, config, Paged(batch, config.windows), cache, recorder)


def through_model(
    params: Decoder,
    slots: Slots,
    batch: Batch,
    config: ModelConfig,
    attend: Attend,
    state: Any,
    recorder: Recorder | None = None,
) -> tuple[Float[Array, "B T D"], Any]:
    """Return the hidden states of every token, and attend's state after them."""
    params = with_owners(params, slots.adapter[batch.slot])
    ends = lengths(slots, batch)
    return forward(params, config, batch.tokens, positions(batch), attend, state, ends, recorder)


def lengths(slots: Slots | StageZeroSlots, batch: Batch) -> Int[Array, " B"]:
    """Return the tokens that each row's sequence may come to: the last that a request may have is sampled and
    never fed."""
    return slots.end[batch.slot] - 1


def step(
    params: Decoder,
    cache: KVCache,
    slots: Slots,
    batch: Batch,
    *,
    config: ModelConfig,
    observe: Observe | None = None,
) -> tuple[KVCache, Slots, Output]:
    """Run the tokens of every row, write their keys, and sample after the last of them."""
    batch, recorder = awake(slots, batch), None if observe is None else Recorder(observe)
    hidden, cache = run(params, cache, slots, batch, config, recorder)
    slots, output = sampled(params, config, slots, batch, hidden)
    return cache, slots, output if recorder is None else replace(output, observed=recorder.observed())


def sampled(
    params: Decoder, config: ModelConfig, slots: Slots, batch: Batch, hidden: Float[Array, "B T D"]
) -> tuple[Slots, Output]:
    """Sample from a step's hidden states, and score prompts."""
    prompt = pooled = None
    if batch.after is not None:
        prompt = prompt_scores(params, config, batch, hidden, slots.scored[batch.slot], slots.sampling.n_top)
        pooled = prompt_pooled(batch, hidden)
    slots, last = sample_last(params, config, slots, batch, hidden)
    return slots, Output(last, prompt, pooled)


def prefill(
    params: Decoder,
    cache: KVCache,
    slots: Slots,
    batch: Batch,
    *,
    config: ModelConfig,
    observe: Observe | None = None,
):
    """Compute rows of one prompt, which see those before them, or of several; sample after those that end
    one."""
    return step(params, cache, slots, batch, config=config, observe=observe)


def verify(
    params: Decoder, cache: KVCache, slots: Slots, batch: Batch, *, config: ModelConfig, rule: Rule = coupled
):
    """Compute a row's last token and draft tokens behind it, T in all; sample up to the first that is not its
    draft token.

    By the rule `coupled` each sample is the one that decoding alone would have drawn (drafter-invariant
    verification, Daliri et al., arXiv 2408.07978). The keys of wrong draft tokens are overwritten before they
    are read.
    """
    return judge(params, cache, slots, awake(slots, batch), None, config=config, rule=rule)


def judge(
    params: Decoder,
    cache: KVCache,
    slots: Slots,
    batch: Batch,
    offers: Float[Array, "B T V"] | None,
    *,
    config: ModelConfig,
    rule: Rule,
) -> tuple[KVCache, Slots, Output]:
    """`verify` for a batch that is awake; `offers` as in `accept`."""
    if STATE not in config.windows:
        hidden, cache = run(params, cache, slots, rows_of_one(batch), config)
        return cache, *judged(params, config, slots, batch, hidden, offers, rule)
    attend = guessing(batch, config.windows)
    hidden, state = through_model(params, slots, rows_of_one(batch), config, attend, VerifyCache(cache, {}))
    slots, output = judged(params, config, slots, batch, hidden, offers, rule)
    right = jnp.sum(output.sampled.token != NO_TOKEN, axis=1, dtype=jnp.int32)
    return state.confirmed(attend.rows, right), slots, output


def guessing(batch: Batch, windows: tuple[int | None, ...]) -> VerifyAttend:
    """Return `attend` for the tokens of a verification as rows of one."""
    paged = Paged(rows_of_one(batch), windows)
    return VerifyAttend(paged, Paged(batch, windows).rows, row_of_place(batch), place_of_row(batch))


def judged(
    params: Decoder,
    config: ModelConfig,
    slots: Slots,
    batch: Batch,
    hidden: Float[Array, "rows 1 D"],
    offers: Float[Array, "B T V"] | None,
    rule: Rule,
) -> tuple[Slots, Output]:
    """Sample from the hidden states of `rows_of_one`."""
    hidden = hidden[:, 0]
    logits = unembed(params, config, hidden)
    slots, found = accept(slots, batch, hidden, logits, offers, rule)
    return slots, Output(found, None)


def decode(
    params: Decoder,
    cache: KVCache,
    slots: Slots,
    batch: Batch,
    *,
    config: ModelConfig,
    observe: Observe | None = None,
):
    """Take T steps of one token a row, each fed with the token before it; `count` of a row is the number that
    it takes.

    Tokens of the batch that are not ON_DEVICE are fed as given: that replays what a preempted request had
    generated. Values are observed with T = 1 only.
    """
    T = batch.tokens.shape[1]
    if T == 1:
        return step(params, cache, slots, batch, config=config, observe=observe)

    def one(i: Int[Array, ""], state: tuple[KVCache, Slots]) -> tuple[tuple[KVCache, Slots], Sampled]:
        count = (i < batch.count).astype(jnp.int32)
        single = replace(batch, tokens=column(batch.tokens, i)[:, None], start=batch.start + i, count=count)
        cache, slots, out = step(params, *state, single, config=config)
        return (cache, slots), jax.tree.map(lambda x: x[:, 0], out.sampled)

    def more(i: Int[Array, ""], state: tuple[KVCache, Slots]) -> Bool[Array, ""]:
        return in_any_shard(jnp.any((i < batch.count) & state[1].live[batch.slot]))

    (cache, slots), found = in_turn(T, more, one, (cache, slots))
    return cache, slots, Output(found, None)
