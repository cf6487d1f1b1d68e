"""Draft model or head of an engine: read from its folder, checked against the model, and added to its
steps."""

from typing import NamedTuple

import jax

from ....checkpoints import heads, huggingface
from ....checkpoints.hub import resolve_draft
from ....kvcache.shardings import sampling_sharding
from ....model.config import ModelConfig
from ....model.draft_head import DraftHead
from ....model.draft_pair import EngineParams, Pair, PairConfig
from ....model.recurrent.kinds import STATE_WINDOW
from ....model.sharding import place_on_devices
from ....model.transformer import Decoder, ObserveOptions
from ...options.speculation import SpeculativeConfig
from ...runtime.steps.phases import Phases, TargetOnly
from .draft_proposers import DraftModelProposer, HeadProposer
from .draft_steps import DraftSpeculation


def check_recurrent_states(config: PairConfig, speculative_config: SpeculativeConfig, stages: int) -> None:
    """Raise ValueError if rejected draft tokens would need an earlier state of a recurrent layer."""
    if not speculative_config.max_draft_tokens or STATE_WINDOW not in config.windows:
        return
    reason = None
    if config.draft is not None and STATE_WINDOW in config.draft.windows:
        reason = (
            f"a draft model with recurrent layers ({speculative_config.model!r}): it cannot take guesses back"
        )
    elif speculative_config.tree is not None:
        reason = "a tree of guesses: recurrent layers take one chain at a time"
    elif stages > 1:
        reason = f"recurrent layers in {stages} pipeline stages"
    if reason:
        raise ValueError(f"speculative_config is not allowed with {reason}")


class SpeculatorWeights(NamedTuple):
    """Parameters of a draft model or of a head.

    params: parameters of the model or head; None if draft tokens come from the host.
    config: configuration of the draft model; None for a head.
    """

    params: Decoder | DraftHead | None = None
    config: ModelConfig | None = None

    @property
    def is_head(self) -> bool:
        return self.params is not None and self.config is None

    def pair_with(self, params: Decoder) -> EngineParams:
        """Return the target's parameters, as a pair with the draft's if there are any."""
        return params if self.params is None else Pair(params, self.params)

    def make_phases(
        self, config: PairConfig, speculative_config: SpeculativeConfig, observe: ObserveOptions | None
    ) -> Phases:
        """Return the phases of the engine's steps. `observe` has an effect only without speculation."""
        if self.params is None:
            return TargetOnly(config.target, speculative_config.acceptance, observe)
        draft = config.draft
        proposer = (
            DraftModelProposer(draft, speculative_config.acceptance) if draft else HeadProposer(config.target)
        )
        return DraftSpeculation(config, proposer, speculative_config.acceptance, speculative_config.tree)


def read_speculator(
    speculative_config: SpeculativeConfig, config: ModelConfig, params: Decoder
) -> SpeculatorWeights:
    """Load the draft model or head of `speculative_config` onto the model's devices. Raises CheckpointError,
    and ValueError if it does not fit the model."""
    if speculative_config.model is None:
        return SpeculatorWeights()
    folder, sharding = resolve_draft(speculative_config.model), sampling_sharding(params)
    if speculative_config.method == "heads" or (
        speculative_config.tree is not None and (folder / heads.HEADS_FILE).exists()
    ):
        head = heads.load_head(folder, config.hidden_size, params.embed.dtype)
        return SpeculatorWeights(jax.tree.map(lambda x: place_on_devices(x, sharding), head))
    if speculative_config.tree is not None and not speculative_config.tree.is_chain_with_siblings:
        raise ValueError(
            f"speculative_config: speculative_token_tree={speculative_config.speculative_token_tree!r} is "
            "not allowed with a draft model: only the first child of a node has children"
        )
    draft_config, draft_params = huggingface.load_hf(folder, params.embed.dtype, sharding)
    if draft_config.vocab_size != config.vocab_size:
        raise ValueError(
            f"speculative_config: model {speculative_config.model!r} has a vocabulary of "
            f"{draft_config.vocab_size}, the model that it drafts for one of {config.vocab_size}: they must "
            "be equal"
        )
    if not draft_config.has_head:
        raise ValueError(
            f"speculative_config: model {speculative_config.model!r} stores no lm_head: it cannot draft"
        )
    return SpeculatorWeights(draft_params, draft_config)
