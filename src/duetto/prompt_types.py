"""Prompts as mappings, under the names of `vllm.inputs`."""

from typing import Any, NotRequired, TypedDict


class IgnoredPromptFields(TypedDict):
    """Fields of vLLM's prompts for multimodal models; only None is accepted."""

    multi_modal_data: NotRequired[None]
    mm_processor_kwargs: NotRequired[None]
    multi_modal_uuids: NotRequired[None]


class TextPrompt(IgnoredPromptFields):
    """Prompt as text, which the model's tokenizer encodes. Requests with equal `cache_salt` share pages."""

    prompt: str
    cache_salt: NotRequired[str | None]


class TokensPrompt(IgnoredPromptFields):
    """Prompt as token ids. `prompt` is its text, which is only repeated in the result."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str | None]
    cache_salt: NotRequired[str | None]


PromptType = str | list[int] | TextPrompt | TokensPrompt | dict[str, Any]
