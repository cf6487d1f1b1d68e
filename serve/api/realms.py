"""The realm of an `LLM`'s answers: a name that servers agree by before one continues another's answer."""

from typing import TYPE_CHECKING, Any

import jax

from ...checkpoints.adapters.adapter import Adapter
from ..audit.facts import words_hash
from ..tiers.realm import realm_of_answers

if TYPE_CHECKING:
    from .llm import LLM


class Realms:
    """Names what an LLM's answers follow from besides what they are asked: weights, code, machine, tokenizer,
    and `others` that its caller knows. Renewed within the turn in which other weights come, so that no token
    of theirs is sent under the name before."""

    def __init__(self, llm: "LLM", *others: Any):
        self._others = others
        with llm._session.turn():
            self.renew(llm)
            llm._session.realms = self

    def renew(self, llm: "LLM") -> None:
        engine, words = llm.engine, llm.tokenizer
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(engine.params)), "no weights to name"
        templates = words and [words.template_for(with_tools=tools) for tools in (False, True)]
        facts = words_hash(words), templates, llm._intake.eos_ids, self._others
        self.name = realm_of_answers(engine.programs, engine.params, llm.options, *facts).hex()

    def of(self, adapter: Adapter | None) -> str:
        """That of an answer with an adapter, whose digest is the second word, or with none."""
        return self.name if adapter is None else f"{self.name} {adapter.digest.hex()}"
