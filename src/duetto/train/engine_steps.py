"""Texts replayed by an engine's own steps: prompts in chunks, then one token of each text at a time.

Where XLA multiplies, rows of a step have bits that depend on their number. So no pass over whole texts has
the bits of the sampler. Its steps have them, inside of the trainer's function too. The derivative is that of
a pass over whole texts.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Int, Shaped

from ..kvcache.paged_attention import PagedAttend
from ..kvcache.pages import Batch, KVCache, empty_cache, token_positions
from ..model.config import ModelConfig
from ..model.gpus import target_device
from ..model.transformer import Decoder, forward, multiply_head
from ..model.weights.cpu.packed import kernel_isa
from ..model.weights.device_forms import DeviceForms, convert_to_device_forms, device_lanes
from .checks import explain_devices, explain_length, require_exact
from .graft import graft_arrays
from .scoring import ScoredTexts, score_by_xla, score_rows
from .tiles import map_row_tiles

ReplayState = tuple[KVCache, Float[Array, "B T D"]]  # the cache, and the hidden states so far


@dataclass(frozen=True)
class EngineSteps:
    """The canonical steps of an engine: their shapes, and the forms of weights.

    decode_rows: number of rows of a decode.
    chunk_tokens: number of tokens of a prefill.
    page_size: number of tokens of a page.
    forms: forms in which weights are multiplied.
    """

    decode_rows: int
    chunk_tokens: int
    page_size: int
    forms: DeviceForms

    def score(self, decoder: Decoder, config: ModelConfig, texts: ScoredTexts) -> Float[Array, " rows"]:
        """Compute log-probabilities as the steps of an engine. Raises ValueError without lengths of prompts,
        and where these are not an engine's bits."""
        has_prompts = texts.prompt_lengths is not None
        require_exact("" if has_prompts else "prompt_lengths are needed: prefill has other bits than decode")
        require_exact(explain_devices(decoder) or explain_length(config, texts.inputs.shape[1] + 1))
        # a batched step would have other bits
        replay = sequential_vmap(lambda decoder, texts: self._score_replayed(decoder, config, texts))
        replayed = replay(jax.lax.stop_gradient(decoder), jax.lax.stop_gradient(texts))
        return graft_arrays(jax.lax.stop_gradient(replayed), score_by_xla(decoder, config, texts))

    def _score_replayed(
        self, decoder: Decoder, config: ModelConfig, texts: ScoredTexts
    ) -> Float[Array, " rows"]:
        decoder = convert_to_device_forms(decoder, self.forms)
        hidden = self._compute_hidden(decoder, config, texts)
        rows = hidden.reshape(-1, hidden.shape[-1])
        products = map_row_tiles(partial(multiply_head, decoder), rows, self.decode_rows)
        return score_rows(
            config, self.decode_rows, products, decoder.head_bias, texts.targets, texts.temperatures
        )

    def _compute_hidden(
        self, decoder: Decoder, config: ModelConfig, texts: ScoredTexts
    ) -> Float[Array, "B T D"]:
        """Return hidden states after the last norm, of as many texts at a time as a decode has rows."""
        B, T = texts.inputs.shape
        group_size = min(B, self.decode_rows)

        def split_texts(x: Shaped[Array, "B *rest"]) -> Shaped[Array, "groups group_size *rest"]:
            padded = jnp.pad(x, ((0, -B % group_size), *((0, 0),) * (x.ndim - 1)))
            return padded.reshape(-1, group_size, *x.shape[1:])

        tokens = jnp.pad(texts.inputs, ((0, 0), (0, -T % self.chunk_tokens)))
        groups = jax.tree.map(split_texts, (tokens, texts.lengths, texts.prompt_lengths))
        hidden = jax.lax.map(lambda group: TextGroup(self, decoder, config, *group).compute_hidden(), groups)
        return hidden.reshape(-1, *hidden.shape[2:])[:B, :T]


@dataclass(frozen=True)
class TextGroup:
    """Texts that are replayed together, in a cache of their own.

    tokens: whole chunks of each text.
    lengths: number of tokens that are read of each text; 0 is padding.
    """

    steps: EngineSteps
    decoder: Decoder
    config: ModelConfig
    tokens: Int[Array, "B T"]
    lengths: Int[Array, " B"]
    prompt_lengths: Int[Array, " B"]

    def compute_hidden(self) -> Float[Array, "B T D"]:
        """Return hidden states after the last norm; zeros after a text's end."""
        (B, T), dtype = self.tokens.shape, self.decoder.embed.dtype
        state = self._make_cache(dtype), jnp.zeros((B, T, self.config.hidden_size), dtype)
        state = jax.lax.fori_loop(0, B, self._prefill_text, state)
        first = jnp.min(jnp.where(self.lengths > 0, self.prompt_lengths, T))
        return jax.lax.fori_loop(first, jnp.max(self.lengths), self._decode, state)[1]

    def _make_cache(self, dtype: Any) -> KVCache:
        device, pages = target_device(), [self._page_table.size] * len(self.config.windows)
        isa, lanes = kernel_isa(self.decoder), device_lanes([device])
        return empty_cache(self.config.layers, pages, self.steps.page_size, dtype, device, isa, lanes)

    @property
    def _page_table(self) -> Int[Array, "B M"]:
        """Return the pages of each text."""
        B, T = self.tokens.shape
        return jnp.arange(B * -(-T // self.steps.page_size), dtype=jnp.int32).reshape(B, -1)

    def _prefill_text(self, row: Int[Array, ""], state: ReplayState) -> ReplayState:
        """Prefill the prompt of a text, in chunks."""
        chunks = -(-self.prompt_lengths[row] // self.steps.chunk_tokens)
        return jax.lax.fori_loop(0, chunks, partial(self._prefill_chunk, row), state)

    def _prefill_chunk(self, row: Int[Array, ""], i: Int[Array, ""], state: ReplayState) -> ReplayState:
        (cache, hidden), chunk = state, self.steps.chunk_tokens
        start = i * chunk
        tokens = jax.lax.dynamic_slice(self.tokens, (row, start), (1, chunk))
        count = jnp.minimum(self.prompt_lengths[row] - start, chunk)
        cache, new = self._run_step(cache, tokens, start[None], count[None], row[None])
        return cache, jax.lax.dynamic_update_slice(hidden, new, (row, start, 0))

    def _decode(self, i: Int[Array, ""], state: ReplayState) -> ReplayState:
        """Run token `i` of all texts whose prompts end before it."""
        (cache, hidden), (B, _), R = state, self.tokens.shape, self.steps.decode_rows
        is_live = (i >= self.prompt_lengths) & (i < self.lengths)
        tokens = jnp.pad(jax.lax.dynamic_slice_in_dim(self.tokens, i, 1, axis=1), ((0, R - B), (0, 0)))
        count = jnp.pad(is_live.astype(jnp.int32), (0, R - B))
        rows = jnp.minimum(jnp.arange(R, dtype=jnp.int32), B - 1)
        cache, new = self._run_step(cache, tokens, jnp.full(R, i, jnp.int32), count, rows)
        return cache, hidden.at[:, i].set(jnp.where(is_live[:, None], new[:B, 0], hidden[:, i]))

    def _run_step(
        self,
        cache: KVCache,
        tokens: Int[Array, "rows T"],
        start: Int[Array, " rows"],
        count: Int[Array, " rows"],
        rows: Int[Array, " rows"],
    ) -> tuple[KVCache, Float[Array, "rows T D"]]:
        """Run a prefill or a decode of these texts; returns the cache and hidden states."""
        config, windows = self.config, self.config.windows
        batch = Batch(tokens, start, count, (self._page_table[rows],) * len(windows), rows)
        attend, positions, lengths = PagedAttend(batch, windows), token_positions(batch), self.lengths[rows]
        hidden, cache = forward(self.decoder, config, tokens, positions, attend, cache, lengths)
        return cache, hidden
