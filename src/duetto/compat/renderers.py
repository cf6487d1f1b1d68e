"""`LLM.renderer`: prompts and conversations as token ids before they are submitted, with vLLM's names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..refusals import unknown
from ..serve.llm.input_processor import TEXTUAL, Prompt
from ..serve.llm.llm import LLM
from ..serve.text.tokenizer.chat import Message


@dataclass(frozen=True)
class TokenizeParams:
    """Settings of tokenization."""

    add_special_tokens: bool = True

    def with_kwargs(self, **changes: Any) -> "TokenizeParams":
        """Return a changed copy. Raises TypeError for an unknown name."""
        for name in changes:
            if name not in self.__dataclass_fields__:
                raise TypeError(unknown("tokenization keyword", name, self.__dataclass_fields__))
        return replace(self, **changes)


@dataclass(frozen=True)
class ChatParams:
    """A template in place of the model's own, and the template's variables."""

    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)


class Renderer:
    """Makes prompts for `LLM.generate`, as mappings of token ids and their text. Errors are those of
    `generate` and `chat`."""

    default_cmpl_tok_params = TokenizeParams()
    default_chat_tok_params = TokenizeParams(add_special_tokens=False)

    def __init__(self, llm: LLM):
        self._processor = llm.input_processor

    def render_cmpl(
        self, prompts: Sequence[Prompt], tok_params: TokenizeParams = default_cmpl_tok_params
    ) -> list[dict[str, Any]]:
        return [self._rendered(prompt, tok_params) for prompt in prompts]

    def render_chat(
        self, conversations: Sequence[list[Message]], chat_params: ChatParams
    ) -> tuple[list[list[Message]], list[dict[str, Any]]]:
        options = {"chat_template": chat_params.chat_template, **chat_params.chat_template_kwargs}
        found = [self._processor.conversation(messages, **options) for messages in conversations]
        return list(conversations), found

    def _rendered(self, prompt: Prompt, tok_params: TokenizeParams) -> dict[str, Any]:
        text, ids = self._processor.tokens(prompt)
        tokenizer = self._processor.tokenizer
        if text is not None and tokenizer is not None and not tok_params.add_special_tokens:
            ids = tokenizer.encode(text, add_special_tokens=False)
        return dict(zip(TEXTUAL, (text, ids), strict=True))


def parse_model_prompt(model_config: Any, prompt: Prompt) -> Prompt:
    """Return a prompt as `render_cmpl` takes it: as it is."""
    return prompt
