"""Prompts as mappings, under the names of `vllm.inputs`."""

from typing import Any, NotRequired, TypedDict


class IgnoredPromptFields(TypedDict):
    """Fields that a prompt of text does not use; only None is accepted."""

    multi_modal_data: NotRequired[None]
    mm_processor_kwargs: NotRequired[None]
    multi_modal_uuids: NotRequired[None]
    cache_salt: NotRequired[None]


class TextPrompt(IgnoredPromptFields):
    """A prompt as text, which the model's tokenizer encodes."""

    prompt: str


class TokensPrompt(IgnoredPromptFields):
    """A prompt as token ids; `prompt`, its text, is only repeated in the result."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str | None]


PromptType = str | list[int] | TextPrompt | TokensPrompt | dict[str, Any]
