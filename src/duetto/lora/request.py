"""Requests for LoRA adapters, as vLLM's scripts make them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..refusals import quote


@dataclass(frozen=True)
class LoRARequest:
    """Adapter that a request asks for. Raises ValueError or TypeError for a wrong field.

    lora_name: name of the adapter. Two requests with one name mean the same adapter if their paths are equal.
    lora_int_id: vLLM's id, above 0.
    lora_path: folder that PEFT has written.
    base_model_name: base model in the server's list of models.
    tensorizer_config_dict: vLLM's; only None is accepted.
    load_inplace: the folder is read again.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    tensorizer_config_dict: None = None
    load_inplace: bool = False

    def __post_init__(self):
        for name in ("lora_name", "lora_path"):
            if not isinstance(value := getattr(self, name), str) or not value:
                raise ValueError(f"{name} {quote(value)} is not allowed: a string that is not empty")
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise ValueError(f"lora_int_id {quote(self.lora_int_id)} is not allowed: an integer above 0")
        if self.tensorizer_config_dict is not None:
            raise ValueError("tensorizer_config_dict is not supported: only None")

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path


LoRARequests = LoRARequest | None | Sequence[LoRARequest | None]  # for all prompts, or one for each


def check_lora_request(lora_request: Any) -> LoRARequest | None:
    """Return an argument that is a LoRARequest or None. Raises TypeError for anything else."""
    if lora_request is not None and not isinstance(lora_request, LoRARequest):
        raise TypeError(f"lora_request is a LoRARequest or None, not {quote(lora_request)}")
    return lora_request
