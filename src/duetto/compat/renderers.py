"""`LLM.renderer`: prompts and conversations as token ids, before they are submitted, with vLLM's names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..refusals import unknown_name_message
from ..serve.llm.input_processor import PROMPT_KEYS, SALT_KEY, PromptInput
from ..serve.llm.llm import LLM
from ..serve.text.cache_salt import read_prompt_salt
from ..serve.text.tokenizer.chats.chat import ChatMessage


@dataclass(frozen=True)
class TokenizeParams:
    """Settings of tokenization.

    add_special_tokens: the tokenizer adds its special tokens, such as the first one.
    """

    add_special_tokens: bool = True

    def with_kwargs(self, **changes: Any) -> "TokenizeParams":
        """Return a changed copy. Raises TypeError for an unknown name."""
        for name in changes:
            if name not in self.__dataclass_fields__:
                raise TypeError(unknown_name_message("tokenization keyword", name, self.__dataclass_fields__))
        return replace(self, **changes)


@dataclass(frozen=True)
class ChatParams:
    """Chat template in place of the model's own (None keeps that), and the template's variables."""

    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)


class Renderer:
    """Renders prompts for `LLM.generate`, as mappings of token ids and their text.

    Raises the errors of `generate` and `chat`.
    """

    default_cmpl_tok_params = TokenizeParams()
    default_chat_tok_params = TokenizeParams(add_special_tokens=False)

    def __init__(self, llm: LLM):
        self._processor = llm.input_processor

    def render_cmpl(
        self, prompts: Sequence[PromptInput], tok_params: TokenizeParams = default_cmpl_tok_params
    ) -> list[dict[str, Any]]:
        return [self._render_prompt(prompt, tok_params) for prompt in prompts]

    def render_chat(
        self, conversations: Sequence[list[ChatMessage]], chat_params: ChatParams
    ) -> tuple[list[list[ChatMessage]], list[dict[str, Any]]]:
        options = {"chat_template": chat_params.chat_template, **chat_params.chat_template_kwargs}
        prompts = [self._processor.render_conversation(messages, **options) for messages in conversations]
        return list(conversations), prompts

    def _render_prompt(self, prompt: PromptInput, tok_params: TokenizeParams) -> dict[str, Any]:
        text, ids = self._processor.tokenize(prompt)
        tokenizer = self._processor.tokenizer
        if text is not None and tokenizer is not None and not tok_params.add_special_tokens:
            ids = tokenizer.encode(text, add_special_tokens=False)
        salt = read_prompt_salt(prompt)
        return dict(zip(PROMPT_KEYS, (text, ids), strict=True)) | ({} if salt is None else {SALT_KEY: salt})


def parse_model_prompt(model_config: Any, prompt: PromptInput) -> PromptInput:
    """Return a prompt unchanged: `render_cmpl` takes it as it is."""
    return prompt
