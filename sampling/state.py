"""Sampler state of the running requests: one pytree on the device, a row for each slot."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, UInt32

from ..model.layers import apart
from ..model.tree import pytree, static
from .checks import MAX_LOGPROBS
from .custom import LogitsProcessor, are_asked
from .params import MAX_BAD_WORD_LENGTH, NO_TOKEN, Knobs, SamplingParams, knobs_row

# The logits of tokens that must not be drawn; finite, so that nothing becomes NaN. Where all tokens are
# masked, those that were masked the least are drawn from.
MASKED = -1e30  # not allowed, a bad word of one token, or outside top_k, top_p, min_p, or a grammar
BANNED = -1e28  # would end a longer bad word
EARLY = -1e26  # would end the output before min_tokens


@pytree
class Allowed:
    """Token masks of grammars for each slot, at consecutive positions: one bit a token."""

    masks: Any  # uint32 [C,positions,words]
    first: Any  # int32 [C], the first of these positions


@pytree
class KeptTokens:
    """Each slot's tokens, prompt and output, for logits processors; NO_TOKEN behind them."""

    tokens: Any  # int32 [C,S]
    length: Any  # int32 [C]
    prompt_len: Any  # int32 [C]


@pytree
class SamplingState:
    """Every request's knobs and history, donated through each step; dense rows are read where a knob says."""

    knobs: Knobs  # [C,...]
    output_counts: Any  # int32 [C,V], how often each token was generated
    in_prompt: Any  # bool [C,V]
    bias: Any  # float32 [C,V]
    recent: Any  # int32 [C,MAX_BAD_WORD_LENGTH-1], the last generated tokens, NO_TOKEN before the first
    allowed: Allowed
    kept: Any = None  # KeptTokens; None without logits processors
    n_top: int = static(MAX_LOGPROBS)  # alternatives that are reported beside a token
    processors: tuple[LogitsProcessor, ...] = static(())


def words_of(V: int) -> int:
    """Words of 32 bits that have one for each token of a vocabulary."""
    return -(-V // 32)


def empty_state(
    slots: int,
    V: int,
    n_top: int = MAX_LOGPROBS,
    positions: int = 1,
    processors: tuple[LogitsProcessor, ...] = (),
    S: int = 0,
) -> SamplingState:
    """All slots greedy and without history; the caller places it on a device. A step samples at most
    `positions` tokens of a row whose grammar says what they may be. Of S tokens of a sequence logits
    processors see all; 0 without these."""
    greedy = SamplingParams(temperature=0.0)
    row = knobs_row(greedy, seed=0, stop_ids=(), prompt_len=0, processors=processors)
    return SamplingState(
        knobs=jax.tree.map(lambda x: jnp.array(np.broadcast_to(x, (slots, *x.shape))), row),
        output_counts=jnp.zeros((slots, V), jnp.int32),
        in_prompt=jnp.zeros((slots, V), bool),
        bias=jnp.zeros((slots, V), jnp.float32),
        recent=jnp.full((slots, MAX_BAD_WORD_LENGTH - 1), NO_TOKEN, jnp.int32),
        allowed=Allowed(
            masks=jnp.zeros((slots, positions, words_of(V)), jnp.uint32), first=jnp.zeros(slots, jnp.int32)
        ),
        kept=empty_tokens(slots, S) if S else None,
        n_top=n_top,
        processors=processors,
    )


def empty_tokens(slots: int, S: int) -> KeptTokens:
    return KeptTokens(
        jnp.full((slots, S), NO_TOKEN, jnp.int32), jnp.zeros(slots, jnp.int32), jnp.zeros(slots, jnp.int32)
    )


def admit(state: SamplingState, slot: Int[Array, "*seats"], knobs: Knobs) -> SamplingState:
    """The state with the knobs of one slot, or of several, replaced."""
    return replace(state, knobs=jax.tree.map(lambda rows, row: rows.at[slot].set(row), state.knobs, knobs))


def load_history(
    state: SamplingState,
    slot: Int[Array, ""],
    tokens: Int[Array, " S"],
    prompt_len: Int[Array, ""],
    total_len: Int[Array, ""],
    bias: Float[Array, " V"],
) -> SamplingState:
    """The state with one slot's history replaced by that of a request with `total_len` tokens, of which the
    first `prompt_len` are its prompt and the rest was generated (before a preemption); `tokens` is padded at
    its end."""
    V = bias.shape[0]
    position = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    prompt, output = position < prompt_len, (position >= prompt_len) & (position < total_len)
    in_prompt = jnp.zeros(V, bool).at[jnp.where(prompt, tokens, V)].set(True, mode="drop")
    counts = jnp.zeros(V, jnp.int32).at[jnp.where(output, tokens, V)].add(1, mode="drop")
    last = total_len - state.recent.shape[1] + jnp.arange(state.recent.shape[1], dtype=jnp.int32)
    recent = jnp.where(last >= prompt_len, tokens.at[last].get(mode="clip"), NO_TOKEN)
    return replace(
        state,
        output_counts=state.output_counts.at[slot].set(counts),
        in_prompt=state.in_prompt.at[slot].set(in_prompt),
        bias=state.bias.at[slot].set(bias),
        recent=state.recent.at[slot].set(recent),
        kept=state.kept and with_tokens(state.kept, slot, tokens, prompt_len, total_len),
    )


def with_tokens(
    kept: KeptTokens,
    slot: Int[Array, ""],
    tokens: Int[Array, " S"],
    prompt_len: Int[Array, ""],
    total_len: Int[Array, ""],
) -> KeptTokens:
    own = jnp.where(jnp.arange(tokens.shape[0], dtype=jnp.int32) < total_len, tokens, NO_TOKEN)
    return KeptTokens(
        kept.tokens.at[slot].set(own),
        kept.length.at[slot].set(total_len),
        kept.prompt_len.at[slot].set(prompt_len),
    )


def load_masks(
    allowed: Allowed,
    slot: Int[Array, " K"],
    first: Int[Array, " K"],
    masks: UInt32[Array, "K positions words"],
) -> Allowed:
    """The masks with those of some slots replaced, from position `first` on; a slot beyond the last is
    ignored."""
    return Allowed(
        masks=allowed.masks.at[slot].set(masks, mode="drop"),
        first=allowed.first.at[slot].set(first, mode="drop"),
    )


def needs_history(params: SamplingParams, processors: Sequence[LogitsProcessor] = ()) -> bool:
    """True if a request's admission needs `load_history`; the other requests' dense rows are never read."""
    penalties = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
    asked = are_asked(processors, params.extra_args or {})
    return bool(penalties or params.bad_words or params.logit_bias or params.allowed_token_ids or asked)


def dense_bias(
    params: SamplingParams, V: int, bad_words: Sequence[Sequence[int]] = ()
) -> Float32[np.ndarray, " {V}"]:
    """The bias of every logit: `logit_bias`, MASKED where not allowed or a bad word.

    Raises ValueError for ids outside the vocabulary, and where no token is left.
    """
    params.check_vocabulary(V)
    beyond = [token for sequence in bad_words for token in sequence if not 0 <= token < V]
    if beyond:
        words = list(params.bad_words or ())
        allowed = f"the vocabulary's ids are 0..{V - 1}"
        raise ValueError(f"bad_words={words!r} has the token id {beyond[0]}: {allowed}")
    bias = np.zeros(V, np.float32)
    for token, value in (params.logit_bias or {}).items():
        bias[token] = value
    if params.allowed_token_ids is not None:
        allowed = list(params.allowed_token_ids)
        bias = np.where(np.isin(np.arange(V), allowed), bias, np.float32(MASKED))
    bias[[sequence[0] for sequence in bad_words if len(sequence) == 1]] = MASKED
    if (bias <= MASKED).all():
        raise ValueError("bad_words and allowed_token_ids leave no token that may be generated")
    return bias


def check_choice(
    params: SamplingParams, V: int, stop_ids: Sequence[int], bad_words: Sequence[Sequence[int]] = ()
) -> None:
    """Raises ValueError as `dense_bias` does, and where every token that may be generated ends the output too
    early."""
    if params.allowed_token_ids is None and not bad_words:
        return
    left = dense_bias(params, V, bad_words) > MASKED
    left[list(stop_ids)] = False
    if params.min_tokens and not left.any():
        raise ValueError(
            f"min_tokens={params.min_tokens} is not allowed: bad_words and allowed_token_ids leave only "
            f"tokens that end the output, {sorted(set(stop_ids))}"
        )


def commit(
    state: SamplingState, slot: Int[Array, " B"], token: Int[Array, " B"], emit: Bool[Array, " B"]
) -> SamplingState:
    """The state after each slot with `emit` generated its token. A slot appears at most once among those."""
    row = apart(slot, emit, state.recent.shape[0])
    # whole rows: parts of them are gathered one by one on a TPU
    recent = jnp.concatenate([state.recent[slot][:, 1:], token[:, None]], axis=1)
    return replace(
        state,
        output_counts=state.output_counts.at[row, token].add(1, mode="drop", unique_indices=True),
        recent=state.recent.at[row].set(recent, mode="drop", unique_indices=True),
        kept=state.kept and one_longer(state.kept, slot, row, token),
    )


def one_longer(
    kept: KeptTokens, slot: Int[Array, " B"], row: Int[Array, " B"], token: Int[Array, " B"]
) -> KeptTokens:
    """The tokens with one more in each row; a row beyond the last slot is ignored."""
    length = kept.length[slot]
    return replace(
        kept,
        tokens=kept.tokens.at[row, length].set(token, mode="drop", unique_indices=True),
        length=kept.length.at[row].set(length + 1, mode="drop", unique_indices=True),
    )


def stops(state: SamplingState, slot: Int[Array, " B"], token: Int[Array, " B"]) -> Bool[Array, " B"]:
    """True where a token is among its slot's stop ids."""
    return jnp.any(state.knobs.stop_ids[slot] == token[:, None], axis=1)
