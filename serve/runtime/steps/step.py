"""The step: prefill, chunked prefill, decode and verification are one pure function at different [B, T]
shapes.

Programs donate the cache and the slots, so both are updated in place. No result depends on which rows share a
batch.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from ....kvcache.paged_attention import PagedAttend
from ....kvcache.pages import ON_DEVICE, Batch, KVCache, token_positions
from ....kvcache.states import VerifyAttend, VerifyCache
from ....model.attention import Attend
from ....model.config import ModelConfig
from ....model.layers import index_or_drop
from ....model.recurrent.kinds import STATE_WINDOW
from ....model.sharding import any_over_shards
from ....model.transformer import NULL_RECORDER, Decoder, ObserveOptions, Recorder, compute_logits, forward
from ....model.tree import pytree
from ....model.weights.lora import NO_ADAPTER, with_row_slots
from ....sampling.accept import NONE_ACCEPTED, AcceptanceRule, DraftTokens, accept_coupled
from ....sampling.checks import MAX_LOGPROBS, RAW_LOGPROBS
from ....sampling.custom_processors import LogitsProcessor
from ....sampling.params import NAN_TOKEN, NO_TOKEN, Knobs
from ....sampling.sample import Sampled, sample
from ....sampling.state import SamplingState, empty_sampling_state, is_stop_token, load_knobs, record_tokens
from .batch_rows import rows_by_token_index, single_token_rows, token_indices_by_row
from .output import ForwardOutput, Output, SampleRows

MIN_LOGIT_ROWS = 8  # rows of a prefill's last product, at least: a product of fewer rows has other bits


@pytree
class Slots:
    """State of each running request on the device between steps, by slot. Axis C is the number of slots."""

    last: Any  # int32 [C], the last sampled token
    live: Any  # bool [C], False once a stop token or the end was reached
    known: Any  # int32 [C], number of tokens from the host: samples for earlier positions are dropped
    end: Any  # int32 [C], number of tokens that the request may have, at most
    adapter: Any  # int32 [C], slot of the request's adapter, or NO_ADAPTER
    sampling: SamplingState
    hidden: Any = None  # [C,D], hidden state that the last token was sampled from; None without a draft head


@pytree
class FirstStageSlots:
    """Leaves of `Slots` that the first stage of a pipeline has."""

    last: Any  # int32 [C]
    live: Any  # bool [C]
    end: Any  # int32 [C]
    adapter: Any  # int32 [C]


@pytree
class SlotContents:
    """First contents of a slot: the scalars of `Slots`, and the request's sampling parameters (`knobs`)."""

    known: Any
    end: Any
    knobs: Knobs
    adapter: Any = NO_ADAPTER


def empty_slots(
    capacity: int,
    V: int,
    hidden: jax.ShapeDtypeStruct | None = None,
    n_top: int = MAX_LOGPROBS,
    positions: int = 1,
    processors: tuple[LogitsProcessor, ...] = (),
    S: int = 0,
    logprobs_mode: str = RAW_LOGPROBS,
) -> Slots:
    """Return `capacity` unused slots. `hidden` is the shape of a last hidden state, if slots keep one. The
    other arguments are as in `empty_sampling_state`."""

    def zeros(dtype):
        return jnp.zeros(capacity, dtype)

    return Slots(
        last=zeros(jnp.int32),
        live=zeros(bool),
        known=zeros(jnp.int32),
        end=zeros(jnp.int32),
        adapter=zeros(jnp.int32) + NO_ADAPTER,
        sampling=empty_sampling_state(capacity, V, n_top, positions, processors, S, logprobs_mode),
        hidden=None if hidden is None else jnp.zeros((capacity, *hidden.shape), hidden.dtype),
    )


def assign_slot(slots: Slots, slot: Int[Array, "*slots"], contents: SlotContents) -> Slots:
    """Assign a slot to a request, or several slots to as many requests; returns the slots."""
    return replace(
        slots,
        last=slots.last.at[slot].set(NO_TOKEN),
        live=slots.live.at[slot].set(True),
        known=slots.known.at[slot].set(contents.known),
        end=slots.end.at[slot].set(contents.end),
        adapter=slots.adapter.at[slot].set(contents.adapter),
        sampling=load_knobs(slots.sampling, slot, contents.knobs),
    )


def resolve_device_tokens(slots: Slots | FirstStageSlots, batch: Batch) -> Batch:
    """Return the batch that the device computes. Rows of stopped slots are empty. ON_DEVICE tokens are
    replaced by the slot's last token."""
    last, live = slots.last[batch.slot], slots.live[batch.slot]
    tokens = jnp.where(batch.tokens == ON_DEVICE, last[:, None], batch.tokens)
    return replace(batch, tokens=tokens, count=jnp.where(live, batch.count, 0))


def store_sampled_tokens(
    slots: Slots, rows: SampleRows, token: Int[Array, " R"]
) -> tuple[Slots, Int[Array, " R"]]:
    """Record the token that was sampled in each wanted row's slot. Returns the slots and the tokens, NO_TOKEN
    in other rows. NAN_TOKEN stops its slot."""
    slot, position = rows.slot, rows.position
    wanted = rows.wanted & (position >= slots.known[slot])
    has_ended = is_stop_token(slots.sampling, slot, token) | (position + 1 >= slots.end[slot])
    has_ended |= token == NAN_TOKEN
    index = index_or_drop(slot, wanted, slots.live.shape[0])
    slots = replace(
        slots,
        last=slots.last.at[index].set(token, mode="drop", unique_indices=True),
        live=slots.live.at[index].set(~has_ended, mode="drop", unique_indices=True),
        sampling=record_tokens(slots.sampling, slot, token, wanted),
        hidden=None
        if slots.hidden is None
        else slots.hidden.at[index].set(rows.hidden, mode="drop", unique_indices=True),
    )
    return slots, jnp.where(wanted, token, NO_TOKEN)


def num_sample_rows(B: int, T: int, num_slots: int) -> int:
    """Return the number of rows that a step of shape [B,T] samples, R, for a shard with `num_slots` slots.

    Decode keeps its width. At most one row of each slot of a prefill samples. Few widths share the program
    that samples, which has at least MIN_LOGIT_ROWS rows: a product of fewer rows has other bits.
    """
    if T == 1:
        return B
    doubled, widest = 1 << (min(B, num_slots) - 1).bit_length(), -(-num_slots // MIN_LOGIT_ROWS)
    return max(MIN_LOGIT_ROWS, min(doubled, MIN_LOGIT_ROWS * widest))


def select_sample_rows(
    slots: Slots, batch: Batch, hidden: Float[Array, "B T D"]
) -> tuple[SampleRows, Int[Array, " R"] | None]:
    """Return the rows of a step that sample the token after their last one, and `Output.row_numbers`."""
    B, T = hidden.shape[:2]
    last = jnp.maximum(batch.count - 1, 0)
    rows = SampleRows(
        hidden=hidden[jnp.arange(B, dtype=jnp.int32), last],
        slot=batch.slot,
        position=batch.start + last + 1,
        wanted=batch.count > 0,
    )
    if T == 1:
        return rows, None
    # at most one row of each slot samples; if a probe's rows share a slot, the last rows do
    is_sampling = rows.wanted & (rows.position >= slots.known[rows.slot])
    R = num_sample_rows(B, T, slots.live.shape[0])
    number = jnp.argsort(is_sampling, stable=True)[-R:].astype(jnp.int32)
    number = jnp.pad(number, (0, R - len(number)), constant_values=B)
    return jax.tree.map(lambda x: x.at[number].get(mode="fill", fill_value=0), rows), number


def sample_rows(
    params: Decoder, config: ModelConfig, slots: Slots, rows: SampleRows
) -> tuple[Slots, Sampled]:
    """Sample the token of each wanted row that the host does not know; returns slots and samples [R,1]."""
    logits = compute_logits(params, config, rows.hidden)
    wanted = rows.wanted & (rows.position >= slots.known[rows.slot])
    drawn = sample(logits, rows.position, rows.slot, wanted, slots.sampling)
    slots, token = store_sampled_tokens(slots, rows, drawn.token)
    return slots, jax.tree.map(lambda x: x[:, None], replace(drawn, token=token))


def run_sampling_loop(T: int, keeps_on: Any, run_one: Any, state: Any) -> tuple[Any, Sampled]:
    """Call `run_one(i, state)`, which returns state and samples [B], for i = 0, 1, ... below T while
    `keeps_on(i, state)`.

    Returns the last state and the samples [B,T], NO_TOKEN in columns that did not run.
    """
    _, abstract = jax.eval_shape(run_one, jnp.int32(0), state)
    empty = jax.tree.map(lambda s: jnp.full((s.shape[0], T, *s.shape[1:]), NO_TOKEN, s.dtype), abstract)

    def loop_body(carry: Any) -> Any:
        i, state, sampled = carry
        state, new = run_one(i, state)
        return i + 1, state, jax.tree.map(lambda all, x: all.at[:, i].set(x), sampled, new)

    def is_unfinished(carry: Any) -> Bool[Array, ""]:
        return (carry[0] < T) & keeps_on(*carry[:2])

    _, state, sampled = jax.lax.while_loop(is_unfinished, loop_body, (jnp.int32(0), state, empty))
    return state, sampled


def take_column(x: Shaped[Array, "B T *rest"], i: Int[Array, ""]) -> Shaped[Array, "B *rest"]:
    """Return x[:, i]."""
    return jax.lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False)


def accept_drafts(
    slots: Slots,
    batch: Batch,
    hidden: Float[Array, "rows D"],
    logits: Float[Array, "rows V"],
    offers: Float[Array, "B T V"] | None,
    rule: AcceptanceRule,
) -> tuple[Slots, Sampled]:
    """Sample after each token of the rows, as long as the samples agree with the draft tokens; returns slots
    and samples [B,T].

    hidden, logits: of the rows of `single_token_rows`.
    offers: distributions that the draft tokens were drawn from; None if they were not drawn.
    """
    T, rows = batch.tokens.shape[1], rows_by_token_index(batch)

    def accept_column(
        i: Int[Array, ""], state: tuple[Slots, Bool[Array, " B"]]
    ) -> tuple[tuple[Slots, Bool[Array, " B"]], Sampled]:
        slots, wanted = state
        position, after = batch.start + i + 1, jnp.minimum(i + 1, T - 1)
        probs = None if offers is None else take_column(offers, after)[:, None]
        draft = DraftTokens(take_column(batch.tokens, after)[:, None], (i + 1 < batch.count)[:, None], probs)
        row = take_column(rows, i)
        drawn, kept = rule(logits[row], position, batch.slot, wanted, slots.sampling, draft)
        sampling = SampleRows(hidden[row], batch.slot, position, wanted)
        slots, token = store_sampled_tokens(slots, sampling, drawn.token)
        return (
            slots,
            wanted & (kept != NONE_ACCEPTED) & (token != NO_TOKEN) & slots.live[batch.slot],
        ), replace(drawn, token=token)

    (slots, _), sampled = run_sampling_loop(
        T, lambda i, state: jnp.any(state[1]), accept_column, (slots, batch.count > 0)
    )
    return slots, sampled


def forward_paged(
    params: Decoder,
    cache: KVCache,
    slots: Slots,
    batch: Batch,
    config: ModelConfig,
    recorder: Recorder = NULL_RECORDER,
) -> tuple[Float[Array, "B T D"], KVCache]:
    """Run the model on the tokens of every row, and write their keys into the cache's pages. Returns hidden
    states and cache."""
    return forward_rows(params, slots, batch, config, PagedAttend(batch, config.windows), cache, recorder)


def forward_rows(
    params: Decoder,
    slots: Slots,
    batch: Batch,
    config: ModelConfig,
    attend: Attend,
    state: Any,
    recorder: Recorder = NULL_RECORDER,
) -> tuple[Float[Array, "B T D"], Any]:
    """Run the model on the tokens of every row, with an attention that has a state. Returns hidden states and
    the attention's state."""
    params = with_row_slots(params, slots.adapter[batch.slot])
    ends = sequence_limits(slots, batch)
    positions = token_positions(batch)
    return forward(params, config, batch.tokens, positions, attend, state, ends, recorder, batch.embeddings)


def sequence_limits(slots: Slots | FirstStageSlots, batch: Batch) -> Int[Array, " B"]:
    """Return the number of tokens that each row's sequence may come to in the cache. The last token of a
    request is sampled, and never computed."""
    return slots.end[batch.slot] - 1


def run_step(
    params: Decoder,
    cache: KVCache,
    slots: Slots,
    batch: Batch,
    *,
    config: ModelConfig,
    observe: ObserveOptions | None = None,
) -> tuple[KVCache, Slots, Output]:
    """Run the tokens of every row, write their keys, and sample after each row's last token."""
    cache, forwarded = forward_step(params, cache, slots, batch, config=config, observe=observe)
    slots, sampled = sample_rows(params, config, slots, forwarded.rows)
    return cache, slots, forwarded.with_samples(sampled)


def forward_step(
    params: Decoder,
    cache: KVCache,
    slots: Slots,
    batch: Batch,
    *,
    config: ModelConfig,
    observe: ObserveOptions | None = None,
) -> tuple[KVCache, ForwardOutput]:
    """Run the tokens of every row, and write their keys; returns the cache, and what `sample_rows` takes."""
    batch = resolve_device_tokens(slots, batch)
    recorder = NULL_RECORDER if observe is None else Recorder(observe)
    hidden, cache = forward_paged(params, cache, slots, batch, config, recorder)
    output = make_forward_output(slots, batch, hidden)
    return cache, output if observe is None else replace(output, observed=recorder.collect())


def make_forward_output(slots: Slots, batch: Batch, hidden: Float[Array, "B T D"]) -> ForwardOutput:
    """Select the rows that sample from a step's hidden states. The output of a prefill has all hidden
    states."""
    rows, number = select_sample_rows(slots, batch, hidden)
    return ForwardOutput(rows, hidden if hidden.shape[1] > 1 else None, row_numbers=number)


def prefill(
    params: Decoder,
    cache: KVCache,
    slots: Slots,
    batch: Batch,
    *,
    config: ModelConfig,
    observe: ObserveOptions | None = None,
):
    """Compute rows of prompts, and sample after each row that ends a prompt. Rows of the same prompt attend
    to the rows before them."""
    return run_step(params, cache, slots, batch, config=config, observe=observe)


def verify(
    params: Decoder,
    cache: KVCache,
    slots: Slots,
    batch: Batch,
    *,
    config: ModelConfig,
    rule: AcceptanceRule = accept_coupled,
):
    """Compute each row's last token and its draft tokens, T in all. Sample up to the first sample that
    differs from its draft token.

    With the rule `accept_coupled` each sample is the token that decode would have drawn (drafter-invariant
    verification, Daliri et al., arXiv 2408.07978). The keys of wrong draft tokens are overwritten before they
    are read.
    """
    return verify_rows(
        params, cache, slots, resolve_device_tokens(slots, batch), None, config=config, rule=rule
    )


def verify_rows(
    params: Decoder,
    cache: KVCache,
    slots: Slots,
    batch: Batch,
    offers: Float[Array, "B T V"] | None,
    *,
    config: ModelConfig,
    rule: AcceptanceRule,
) -> tuple[KVCache, Slots, Output]:
    """Verify the draft tokens of a batch that `resolve_device_tokens` has returned; `offers` as in
    `accept_drafts`.

    Recurrent states advance by the accepted tokens only, after sampling.
    """
    if STATE_WINDOW not in config.windows:
        hidden, cache = forward_paged(params, cache, slots, single_token_rows(batch), config)
        return cache, *accept_rows(params, config, slots, batch, hidden, offers, rule)
    attend = make_verify_attention(batch, config.windows)
    hidden, state = forward_rows(
        params, slots, single_token_rows(batch), config, attend, VerifyCache(cache, {})
    )
    slots, output = accept_rows(params, config, slots, batch, hidden, offers, rule)
    right = jnp.sum(output.sampled.token != NO_TOKEN, axis=1, dtype=jnp.int32)
    return state.commit(attend.state_rows, right), slots, output


def make_verify_attention(batch: Batch, windows: tuple[int | None, ...]) -> VerifyAttend:
    """Return the attention for a verification's tokens as rows of one token each."""
    paged = PagedAttend(single_token_rows(batch), windows)
    return VerifyAttend(
        paged, PagedAttend(batch, windows).state_rows, rows_by_token_index(batch), token_indices_by_row(batch)
    )


def accept_rows(
    params: Decoder,
    config: ModelConfig,
    slots: Slots,
    batch: Batch,
    hidden: Float[Array, "rows 1 D"],
    offers: Float[Array, "B T V"] | None,
    rule: AcceptanceRule,
) -> tuple[Slots, Output]:
    """Sample from the hidden states of `single_token_rows`, and accept draft tokens; returns slots and
    Output."""
    hidden = hidden[:, 0]
    logits = compute_logits(params, config, hidden)
    slots, sampled = accept_drafts(slots, batch, hidden, logits, offers, rule)
    return slots, Output(sampled)


def decode(
    params: Decoder,
    cache: KVCache,
    slots: Slots,
    batch: Batch,
    *,
    config: ModelConfig,
    observe: ObserveOptions | None = None,
):
    """Take T steps of one token a row, each with the token that the step before has sampled. `count` is the
    number of steps that a row takes.

    Tokens of the batch that are not ON_DEVICE are used as they are: so a preempted request replays the tokens
    that it had generated. Values are observed with T = 1 only.
    """
    T = batch.tokens.shape[1]
    if T == 1:
        return run_step(params, cache, slots, batch, config=config, observe=observe)

    def decode_one(i: Int[Array, ""], state: tuple[KVCache, Slots]) -> tuple[tuple[KVCache, Slots], Sampled]:
        count = (i < batch.count).astype(jnp.int32)
        single = replace(
            batch, tokens=take_column(batch.tokens, i)[:, None], start=batch.start + i, count=count
        )
        cache, slots, out = run_step(params, *state, single, config=config)
        return (cache, slots), jax.tree.map(lambda x: x[:, 0], out.sampled)

    def has_live_rows(i: Int[Array, ""], state: tuple[KVCache, Slots]) -> Bool[Array, ""]:
        return any_over_shards(jnp.any((i < batch.count) & state[1].live[batch.slot]))

    (cache, slots), sampled = run_sampling_loop(T, has_live_rows, decode_one, (cache, slots))
    return cache, slots, Output(sampled)
