"""Computation of a stage. All stages of a route together compute `steps.step`, cut between layers or inside
of layers. The first stage embeds, the last one samples."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ....kvcache.paged_attention import PagedAttend
from ....kvcache.pages import Batch, KVCache, token_positions
from ....kvcache.stages import stage_config
from ....model.config import ModelConfig
from ....model.layers import normalise
from ....model.transformer import (
    Decoder,
    Layer,
    add_ffn_residual,
    embed_tokens,
    rotary_by_layer,
    run_attention_sublayer,
    run_ffn,
    run_layers,
)
from ....model.tree import pytree
from ....model.weights.lora import num_lora_slots, with_row_slots
from ....sampling.accept import RULES
from ....sampling.params import NO_TOKEN
from ..steps.batch_rows import single_token_rows
from ..steps.output import Output
from ..steps.step import (
    FirstStageSlots,
    Slots,
    accept_rows,
    make_forward_output,
    resolve_device_tokens,
    sample_rows,
    sequence_limits,
)
from .route import ATTENTION_HALF, FFN_HALF, Stage


@pytree
class StageActivations:
    """Hidden states between stages, and the parts of the batch that only the first stage knows."""

    hidden: Any  # [B,T,D]; in a verification [rows,1,D]
    tokens: Any  # int32 [B,T]
    count: Any  # int32 [B]
    lengths: Any  # int32 [rows of hidden], tokens that the sequence may come to
    owner: Any = None  # int32 [rows of hidden], places of the rows' adapters; None without adapters


@dataclass(frozen=True)
class StageStep:
    """Stage's part of a phase.

    config: of the whole model.
    stage: the stage.
    phase: name of the phase.
    acceptance: rule of verification.
    """

    config: ModelConfig
    stage: Stage
    phase: str
    acceptance: str = "coupled"

    def run(
        self,
        params: Any,
        cache: KVCache | None,
        slots: Slots | None,
        kept_activations: StageActivations | None,
        inputs: Any,
        batch: Batch | None,
    ) -> tuple[Any, Any, Output | None, Any]:
        """Compute the stage.

        cache: pools of its layers.
        slots: for the last stage only.
        kept_activations: activations that an attention half on this group has kept for this stage.
        inputs: output of the stage before; for the first stage its `FirstStageSlots`.

        Returns the cache, what the group keeps (activations, or the last stage's slots), the output of the
        last stage, and the input of the next stage.
        """
        if self.stage.half == FFN_HALF:
            return None, None, None, run_ffn(params, self.config.layers[self.stage.layers.start], inputs)
        assert batch is not None
        activations, ffn_input = self._initial_activations(params, kept_activations, inputs, batch), None
        if self.stage.half == ATTENTION_HALF and cache is not None:
            cache, activations, ffn_input = self._run_attention(params.layers[-1], cache, activations, batch)
        elif cache is not None:
            cache, activations = self._run_layers(params.layers, cache, activations, batch)
        if self.stage.is_last:
            assert slots is not None
            return cache, *self._sample(params, slots, activations, batch)
        return (
            (cache, None, None, activations) if ffn_input is None else (cache, activations, None, ffn_input)
        )

    def _initial_activations(
        self, params: Decoder, kept_activations: StageActivations | None, inputs: Any, batch: Batch
    ) -> StageActivations:
        """Return the activations before the stage's first layer: embeddings, activations of the stage before,
        or the sum of kept activations and the feed-forward layer's output."""
        if self.stage.is_first:
            batch = resolve_device_tokens(inputs, batch)
            model_batch = self._model_batch(batch)
            x = embed_tokens(params, self.config, model_batch.tokens, token_positions(model_batch))
            owner = inputs.adapter[model_batch.slot] if num_lora_slots(params) else None
            return StageActivations(x, batch.tokens, batch.count, sequence_limits(inputs, model_batch), owner)
        if kept_activations is None:
            return inputs
        return replace(
            kept_activations,
            hidden=add_ffn_residual(params.layers[0], self.config, kept_activations.hidden, inputs),
        )

    def _run_layers(
        self, layers: Sequence[Layer], cache: KVCache, activations: StageActivations, batch: Batch
    ) -> tuple[KVCache, StageActivations]:
        """Run the stage's whole layers; returns cache and activations."""
        model_batch = self._model_batch(with_resolved_tokens(batch, activations))
        config = stage_config(self.config, self.stage.layers)
        attend, layers = (
            PagedAttend(model_batch, self.config.windows),
            with_row_slots(layers, activations.owner),
        )
        x, cache = run_layers(
            layers,
            config,
            activations.hidden,
            token_positions(model_batch),
            activations.lengths,
            attend,
            cache,
        )
        return cache, replace(activations, hidden=x)

    def _run_attention(
        self, layer: Layer, cache: KVCache, activations: StageActivations, batch: Batch
    ) -> tuple[KVCache, StageActivations, Float[Array, "B T D"]]:
        """Run a layer up to its feed-forward layer; returns cache, activations, and the feed-forward layer's
        input."""
        model_batch = self._model_batch(with_resolved_tokens(batch, activations))
        config = stage_config(self.config, self.stage.layers)
        (rotary,) = rotary_by_layer(config, token_positions(model_batch), activations.lengths)
        attend, kind = PagedAttend(model_batch, self.config.windows), config.layers[0]
        x, ffn_input, cache = run_attention_sublayer(
            layer, kind, config, activations.hidden, rotary, attend, cache, 0
        )
        return cache, replace(activations, hidden=x), ffn_input

    def _sample(
        self, params: Decoder, slots: Slots, activations: StageActivations, batch: Batch
    ) -> tuple[Slots, Output, FirstStageSlots]:
        """Sample from the hidden states after the last layer; returns slots, output, and the update for stage
        zero."""
        batch = with_resolved_tokens(batch, activations)
        hidden = normalise(activations.hidden, params.norm, self.config.norm)
        if self.phase == "verify":
            slots, output = accept_rows(
                params, self.config, slots, batch, hidden, None, RULES[self.acceptance]
            )
        else:
            forwarded = make_forward_output(slots, batch, hidden)
            slots, sampled = sample_rows(params, self.config, slots, forwarded.rows)
            output = forwarded.with_samples(sampled)
        return slots, output, select_first_stage_slots(slots)

    def _model_batch(self, batch: Batch) -> Batch:
        """Return the batch that the model runs: a verification's tokens are rows of one token each."""
        return single_token_rows(batch) if self.phase == "verify" else batch


def with_resolved_tokens(batch: Batch, activations: StageActivations) -> Batch:
    """Return the host's batch with the tokens and counts that the first stage has computed."""
    return replace(batch, tokens=activations.tokens, count=activations.count)


def select_first_stage_slots(slots: Slots) -> FirstStageSlots:
    """Return the leaves of the slots that the first stage has."""
    return FirstStageSlots(slots.last, slots.live, slots.end, slots.adapter)


def assign_first_stage_slot(
    first_stage_slots: FirstStageSlots, slot: Int[Array, ""], end: Int[Array, ""], adapter: Int[Array, ""]
) -> FirstStageSlots:
    """Assign a slot of the first stage to another request."""
    return FirstStageSlots(
        last=first_stage_slots.last.at[slot].set(NO_TOKEN),
        live=first_stage_slots.live.at[slot].set(True),
        end=first_stage_slots.end.at[slot].set(end),
        adapter=first_stage_slots.adapter.at[slot].set(adapter),
    )


def merge_slot_update(
    first_stage_slots: FirstStageSlots, last_stage_slots: FirstStageSlots, mask: Bool[Array, " C"]
) -> FirstStageSlots:
    """Merge the last stage's `last_stage_slots` of the slots in `mask` into the first stage's slots."""
    last = jnp.where(mask, last_stage_slots.last, first_stage_slots.last)
    live = jnp.where(mask, last_stage_slots.live, first_stage_slots.live)
    return replace(first_stage_slots, last=last, live=live)
