"""The realm of an engine's answers: a name that servers agree by before one continues another's answer."""

from typing import Any

from ....checkpoints.adapters.adapter import Adapter
from ...engine.core.engine import Engine
from ...kv.offload.opening import are_there
from ...kv.offload.realm import realm_of_answers
from ...options.engine import EngineOptions
from ...text.tokenizer.tokenizer import Tokenizer
from .facts import words_hash


class Realms:
    """The realm of answers: a hash of weights, code, machine, tokenizer, and `others` of the caller's. Renew
    it in the turn that replaces the weights, so that no token of theirs is sent under the old name."""

    def __init__(self, engine: Engine, options: EngineOptions, tokenizer: Tokenizer | None, *others: Any):
        templates = tokenizer and [tokenizer.template_for(with_tools=tools) for tools in (False, True)]
        self._options, self._facts = options, (words_hash(tokenizer), templates, *others)
        self.renew(engine)

    def renew(self, engine: Engine) -> None:
        assert are_there(engine.params), "there are no weights to name"
        found = realm_of_answers(engine.programs, engine.params, self._options, *self._facts)
        self.name = found.hex()

    def of(self, adapter: Adapter | None) -> str:
        """Return the realm of an answer; with an adapter, its digest is the second word."""
        return self.name if adapter is None else f"{self.name} {adapter.digest.hex()}"
