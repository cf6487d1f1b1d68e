"""What guesses beside layers that keep a state, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
from cases.models import RANDOM, TINY
from cases.weights import drawn

from duetto import LLM
from duetto.model.config import ModelConfig
from duetto.model.draft_pair import PairConfig
from duetto.model.transformer import decoder_spec
from duetto.serve.engine.speculation.speculator_weights import check_recurrent_states
from duetto.serve.options.speculation import SpeculativeConfig

RECURRENT = RANDOM["recurrent"]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
DRAFT = {"model": "small", "num_speculative_tokens": 3}
TREE = {"method": "tree", "model": "heads", "speculative_token_tree": [[0], [1], [0, 0]]}


def check(target: ModelConfig, draft: ModelConfig | None, chosen: dict[str, Any], stages: int = 1) -> None:
    check_recurrent_states(PairConfig(target, draft), SpeculativeConfig.from_dict(chosen), stages)


@pytest.mark.parametrize(
    "target, draft, chosen, stages, why",
    [
        (RECURRENT, None, TREE, 1, "a tree of guesses: recurrent layers take one chain at a time"),
        (RECURRENT, TINY, TREE, 1, "a tree of guesses: recurrent layers take one chain at a time"),
        (TINY, RECURRENT, DRAFT, 1, "a draft model with recurrent layers .'small'.: it cannot take guesses"),
        (RECURRENT, RECURRENT, DRAFT, 1, "a draft model with recurrent layers"),
        (RECURRENT, None, NGRAM, 2, "recurrent layers in 2 pipeline stages"),
    ],
)
def test_drafts_that_need_unavailable_states_are_refused(target, draft, chosen, stages, why):
    with pytest.raises(ValueError, match=f"speculative_config is not allowed with {why}"):
        check(target, draft, chosen, stages)


@pytest.mark.parametrize(
    "target, draft, chosen, stages",
    [
        (RECURRENT, None, {}, 2),
        (RECURRENT, None, {"method": "none"}, 1),
        (RECURRENT, None, NGRAM, 1),
        (RECURRENT, TINY, DRAFT, 1),
        (TINY, TINY, TREE, 1),
        (TINY, None, NGRAM, 2),
    ],
)
def test_others_are_allowed(target, draft, chosen, stages):
    check(target, draft, chosen, stages)


def test_an_engine_is_refused_a_tree():
    config = replace(RECURRENT, layers=RECURRENT.layers[:2], vocab_size=2048)
    params = drawn(decoder_spec(config))
    with pytest.raises(ValueError, match="speculative_config is not allowed with a tree of guesses"):
        LLM.from_params(config, params, speculative_config=TREE | {"model": "demo-draft"})
