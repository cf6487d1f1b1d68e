"""Sampler state of the running requests: one pytree on the device, with a row for each slot."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, UInt32

from ..model.layers import index_or_drop
from ..model.tree import pytree, static
from .checks import MAX_LOGPROBS, RAW_LOGPROBS
from .custom_processors import LogitsProcessor, has_active_processor
from .params import MAX_BAD_WORD_LENGTH, NO_TOKEN, Knobs, SamplingParams, request_knobs

# Logits of tokens that must not be drawn; finite, so that nothing becomes NaN. If all tokens of a row are
# masked, those with the smallest mask are drawn.
MASKED = -1e30  # not allowed, a bad word of one token, or outside top_k, top_p, min_p, or a grammar
BANNED = -1e28  # would end a longer bad word
EARLY = -1e26  # would end the output before min_tokens
MASKED_DISTANCE = 1e18  # logits so far below the largest are masked; biases and penalties change less


@pytree
class TokenMasks:
    """Token masks of grammars for each slot, at consecutive positions, with one bit per token."""

    masks: Any  # uint32 [C,positions,words]
    first: Any  # int32 [C], first of these positions


@pytree
class TokenHistory:
    """Tokens of each slot, prompt and output, for logits processors; NO_TOKEN after the last."""

    tokens: Any  # int32 [C,S]
    length: Any  # int32 [C]
    prompt_len: Any  # int32 [C]


@pytree
class SamplingState:
    """Knobs and history of every slot, donated through each step. Dense rows are only read if a knob says
    so."""

    knobs: Knobs  # [C,...]
    output_counts: Any  # int32 [C,V], how often each token was generated
    in_prompt: Any  # bool [C,V]
    bias: Any  # float32 [C,V]
    recent_tokens: (
        Any  # int32 [C,MAX_BAD_WORD_LENGTH-1], the last generated tokens, NO_TOKEN before the first
    )
    token_masks: TokenMasks
    token_history: Any = None  # TokenHistory, or None without logits processors
    n_top: int = static(MAX_LOGPROBS)  # alternatives that are reported beside a token
    processors: tuple[LogitsProcessor, ...] = static(())
    logprobs_mode: str = static(RAW_LOGPROBS)  # logits whose log-probabilities are reported


def num_mask_words(V: int) -> int:
    """Return the number of 32-bit words with one bit for each of V tokens."""
    return -(-V // 32)


def empty_sampling_state(
    slots: int,
    V: int,
    n_top: int = MAX_LOGPROBS,
    positions: int = 1,
    processors: tuple[LogitsProcessor, ...] = (),
    S: int = 0,
    logprobs_mode: str = RAW_LOGPROBS,
) -> SamplingState:
    """Return the state in which all slots are greedy and without history. The caller places it on a device.
    `positions` is the most tokens of a row with a grammar that a step samples. `S` is the most tokens of a
    sequence, for logits processors; 0 without any."""
    greedy = SamplingParams(temperature=0.0)
    row = request_knobs(greedy, seed=0, stop_ids=(), prompt_len=0, processors=processors)
    return SamplingState(
        knobs=jax.tree.map(lambda x: jnp.array(np.broadcast_to(x, (slots, *x.shape))), row),
        output_counts=jnp.zeros((slots, V), jnp.int32),
        in_prompt=jnp.zeros((slots, V), bool),
        bias=jnp.zeros((slots, V), jnp.float32),
        recent_tokens=jnp.full((slots, MAX_BAD_WORD_LENGTH - 1), NO_TOKEN, jnp.int32),
        token_masks=TokenMasks(
            masks=jnp.zeros((slots, positions, num_mask_words(V)), jnp.uint32),
            first=jnp.zeros(slots, jnp.int32),
        ),
        token_history=empty_token_history(slots, S) if S else None,
        n_top=n_top,
        processors=processors,
        logprobs_mode=logprobs_mode,
    )


def empty_token_history(slots: int, S: int) -> TokenHistory:
    """Return empty histories of slots, with room for S tokens each."""
    return TokenHistory(
        jnp.full((slots, S), NO_TOKEN, jnp.int32), jnp.zeros(slots, jnp.int32), jnp.zeros(slots, jnp.int32)
    )


def load_knobs(state: SamplingState, slot: Int[Array, "*slots"], knobs: Knobs) -> SamplingState:
    """Return the state with the knobs of one slot, or of several, replaced."""
    return replace(state, knobs=jax.tree.map(lambda rows, row: rows.at[slot].set(row), state.knobs, knobs))


def load_history(
    state: SamplingState,
    slot: Int[Array, ""],
    tokens: Int[Array, " S"],
    prompt_len: Int[Array, ""],
    total_len: Int[Array, ""],
    bias: Float[Array, " V"],
) -> SamplingState:
    """Return the state with one slot's history replaced by a request's `total_len` tokens. The first
    `prompt_len` are its prompt, the rest was generated (before a preemption). `tokens` is padded at its
    end."""
    V = bias.shape[0]
    position = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    prompt, output = position < prompt_len, (position >= prompt_len) & (position < total_len)
    in_prompt = jnp.zeros(V, bool).at[jnp.where(prompt, tokens, V)].set(True, mode="drop")
    counts = jnp.zeros(V, jnp.int32).at[jnp.where(output, tokens, V)].add(1, mode="drop")
    last = (
        total_len - state.recent_tokens.shape[1] + jnp.arange(state.recent_tokens.shape[1], dtype=jnp.int32)
    )
    recent = jnp.where(last >= prompt_len, tokens.at[last].get(mode="clip"), NO_TOKEN)
    return replace(
        state,
        output_counts=state.output_counts.at[slot].set(counts),
        in_prompt=state.in_prompt.at[slot].set(in_prompt),
        bias=state.bias.at[slot].set(bias),
        recent_tokens=state.recent_tokens.at[slot].set(recent),
        token_history=state.token_history
        and with_slot_tokens(state.token_history, slot, tokens, prompt_len, total_len),
    )


def with_slot_tokens(
    token_history: TokenHistory,
    slot: Int[Array, ""],
    tokens: Int[Array, " S"],
    prompt_len: Int[Array, ""],
    total_len: Int[Array, ""],
) -> TokenHistory:
    """Return the tokens of all slots, with one slot's tokens replaced."""
    known_tokens = jnp.where(jnp.arange(tokens.shape[0], dtype=jnp.int32) < total_len, tokens, NO_TOKEN)
    return TokenHistory(
        token_history.tokens.at[slot].set(known_tokens),
        token_history.length.at[slot].set(total_len),
        token_history.prompt_len.at[slot].set(prompt_len),
    )


def load_masks(
    token_masks: TokenMasks,
    slot: Int[Array, " K"],
    first: Int[Array, " K"],
    masks: UInt32[Array, "K positions words"],
) -> TokenMasks:
    """Return the masks with some slots' masks replaced, from position `first` on. A slot past the last is
    ignored."""
    return TokenMasks(
        masks=token_masks.masks.at[slot].set(masks, mode="drop"),
        first=token_masks.first.at[slot].set(first, mode="drop"),
    )


def needs_history(params: SamplingParams, processors: Sequence[LogitsProcessor] = ()) -> bool:
    """True if a request's admission needs `load_history`. Dense rows of other requests are never read."""
    penalties = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
    asked = has_active_processor(processors, params.extra_args or {})
    return bool(penalties or params.bad_words or params.logit_bias or params.allowed_token_ids or asked)


def dense_bias(
    params: SamplingParams, V: int, bad_words: Sequence[Sequence[int]] = ()
) -> Float32[np.ndarray, " {V}"]:
    """Return the bias of every logit: `logit_bias`, or MASKED for a token that is not allowed or a bad word.
    All ids must be below V."""
    bias, biases = np.zeros(V, np.float32), params.logit_bias or {}
    bias[token_id_array(biases)] = np.fromiter(biases.values(), np.float32, len(biases))
    if params.allowed_token_ids is not None:
        allowed, free = token_id_array(params.allowed_token_ids), bias
        bias = np.full(V, MASKED, np.float32)
        bias[allowed] = free[allowed]
    bias[[sequence[0] for sequence in bad_words if len(sequence) == 1]] = MASKED
    return bias


def token_id_array(ids: Collection[int]) -> Int[np.ndarray, " n"]:
    """Return token ids as an int64 array, without a list of them in between."""
    return np.fromiter(ids, np.int64, len(ids))


def check_allowed_tokens(
    params: SamplingParams, V: int, stop_ids: Sequence[int], bad_words: Sequence[Sequence[int]] = ()
) -> None:
    """Raise ValueError for ids outside the vocabulary, if no token is left, or if all that are left end the
    output before min_tokens."""
    params.check_vocabulary(V)
    if params.allowed_token_ids is None and not bad_words:
        return
    beyond = [token for sequence in bad_words for token in sequence if not 0 <= token < V]
    if beyond:
        words = list(params.bad_words or ())
        allowed = f"the vocabulary's ids are 0..{V - 1}"
        raise ValueError(f"bad_words={words!r} has the token id {beyond[0]}: {allowed}")
    left = dense_bias(params, V, bad_words) > MASKED
    if not left.any():
        raise ValueError("bad_words and allowed_token_ids leave no token that may be generated")
    left[list(stop_ids)] = False
    if params.min_tokens and not left.any():
        raise ValueError(
            f"min_tokens={params.min_tokens} is not allowed: bad_words and allowed_token_ids leave only "
            f"tokens that end the output, {sorted(set(stop_ids))}"
        )


def record_tokens(
    state: SamplingState, slot: Int[Array, " B"], token: Int[Array, " B"], emit: Bool[Array, " B"]
) -> SamplingState:
    """Return the state after each slot with `emit` generated its token. Such a slot must appear only once
    (unique indices)."""
    row = index_or_drop(slot, emit, state.recent_tokens.shape[0])
    # gather whole rows: a TPU gathers parts of rows one by one
    recent = jnp.concatenate([state.recent_tokens[slot][:, 1:], token[:, None]], axis=1)
    return replace(
        state,
        output_counts=state.output_counts.at[row, token].add(1, mode="drop", unique_indices=True),
        recent_tokens=state.recent_tokens.at[row].set(recent, mode="drop", unique_indices=True),
        token_history=state.token_history and append_tokens(state.token_history, slot, row, token),
    )


def append_tokens(
    token_history: TokenHistory, slot: Int[Array, " B"], row: Int[Array, " B"], token: Int[Array, " B"]
) -> TokenHistory:
    """Append one token to each row's slot; a row past the last slot is ignored."""
    length = token_history.length[slot]
    return replace(
        token_history,
        tokens=token_history.tokens.at[row, length].set(token, mode="drop", unique_indices=True),
        length=token_history.length.at[row].set(length + 1, mode="drop", unique_indices=True),
    )


def is_stop_token(state: SamplingState, slot: Int[Array, " B"], token: Int[Array, " B"]) -> Bool[Array, " B"]:
    """True where a token is among its slot's stop ids."""
    return jnp.any(state.knobs.stop_ids[slot] == token[:, None], axis=1)
