"""Draft model or head of an engine: read from its folder, checked against the model, and joined with its
steps."""

from typing import NamedTuple

import jax

from ....checkpoints import heads, huggingface
from ....checkpoints.hub import resolve_draft
from ....kvcache.placement import everywhere
from ....model.config import ModelConfig
from ....model.heads import Head
from ....model.pair import Pair, PairConfig, Params
from ....model.recurrent.kinds import STATE
from ....model.sharding import place_at
from ....model.transformer import Decoder, Observe
from ...options.speculation import SpeculativeConfig
from ...runtime.steps.phases import Phases, TargetOnly
from .draft_steps import DraftSpeculation
from .guessers import DraftModel, HeadProposer


def check_states(config: PairConfig, chosen: SpeculativeConfig, stages: int) -> None:
    """Raise ValueError if draft tokens would need a saved state of a recurrent layer."""
    if not chosen.guesses or STATE not in config.windows:
        return
    why = None
    if config.draft is not None and STATE in config.draft.windows:
        why = f"a draft model with recurrent layers ({chosen.model!r}): it cannot take guesses back"
    elif chosen.tree is not None:
        why = "a tree of guesses: recurrent layers take one chain at a time"
    elif stages > 1:
        why = f"recurrent layers in {stages} pipeline stages"
    if why:
        raise ValueError(f"speculative_config is not allowed with {why}")


class SpeculatorWeights(NamedTuple):
    """Parameters of a head, without `config`, or of a draft model; neither if draft tokens come from the
    host."""

    params: Decoder | Head | None = None
    config: ModelConfig | None = None

    @property
    def is_head(self) -> bool:
        return self.params is not None and self.config is None

    def join(self, params: Decoder) -> Params:
        return params if self.params is None else Pair(params, self.params)

    def phases(self, config: PairConfig, chosen: SpeculativeConfig, observe: Observe | None) -> Phases:
        """Return the phases of the engine's steps; `observe` only without speculation."""
        if self.params is None:
            return TargetOnly(config.target, chosen.acceptance, observe)
        draft = config.draft
        guesser = DraftModel(draft, chosen.acceptance) if draft else HeadProposer(config.target)
        return DraftSpeculation(config, guesser, chosen.acceptance, chosen.tree)


def read_beside(chosen: SpeculativeConfig, config: ModelConfig, params: Decoder) -> SpeculatorWeights:
    """Load the draft model or head of `speculative_config` onto the model's devices. Raises CheckpointError,
    and ValueError if it does not fit the model."""
    if chosen.model is None:
        return SpeculatorWeights()
    folder, where = resolve_draft(chosen.model), everywhere(params)
    if chosen.method == "heads" or (chosen.tree is not None and (folder / heads.FILE).exists()):
        head = heads.load_head(folder, config.hidden_size, params.embed.dtype)
        return SpeculatorWeights(jax.tree.map(lambda x: place_at(x, where), head))
    if chosen.tree is not None and not chosen.tree.is_comb:
        raise ValueError(
            f"speculative_config: speculative_token_tree={chosen.speculative_token_tree!r} is not allowed "
            "with a draft model: only the first child of a node has children"
        )
    draft, own = huggingface.load(folder, params.embed.dtype, where)
    if draft.vocab_size != config.vocab_size:
        raise ValueError(
            f"speculative_config: model {chosen.model!r} has a vocabulary of {draft.vocab_size}, "
            f"the model that it drafts for one of {config.vocab_size}: they must be equal"
        )
    return SpeculatorWeights(own, draft)
