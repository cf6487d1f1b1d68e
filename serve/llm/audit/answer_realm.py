"""The realm of an engine's answers: a hash. One server continues another's answer only if their realms are
equal."""

from typing import Any

from ....checkpoints.adapters.adapter import Adapter
from ...engine.core.engine import Engine
from ...kv.offload.realm import hash_answer_realm
from ...kv.offload.tier_setup import are_params_on_device
from ...options.engine import EngineOptions
from ...text.tokenizer.tokenizer import Tokenizer
from .facts import hash_tokenizer


class AnswerRealm:
    """The realm of answers: a hash of weights, code, machine, tokenizer, and the caller's `others`.

    Call `renew` in the turn that replaces the weights: then no token of the new weights is sent under the old
    name. `name` is the hash, in hexadecimal digits.
    """

    def __init__(self, engine: Engine, options: EngineOptions, tokenizer: Tokenizer | None, *others: Any):
        templates = tokenizer and [tokenizer.get_chat_template(with_tools=tools) for tools in (False, True)]
        self._options, self._facts = options, (hash_tokenizer(tokenizer), templates, *others)
        self.renew(engine)

    def renew(self, engine: Engine) -> None:
        assert are_params_on_device(engine.params), "there are no weights to name"
        digest = hash_answer_realm(engine.programs, engine.params, self._options, *self._facts)
        self.name = digest.hex()

    def name_with_adapter(self, adapter: Adapter | None) -> str:
        """Return the realm of an answer: `name`, and for an adapter its digest as a second word."""
        return self.name if adapter is None else f"{self.name} {adapter.digest.hex()}"
