"""Which adapter a request wants, as vLLM's scripts say it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..refusals import shown


@dataclass(frozen=True)
class LoRARequest:
    """An adapter by its name and the folder that PEFT has written. `lora_int_id` is vLLM's, above 0; two
    requests for one name want the same adapter if their paths are equal. With `load_inplace` the folder is
    read again. `base_model_name` is what a list of models says of its base. Raises ValueError or TypeError.
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
                raise ValueError(f"{name} {shown(value)} is not allowed: a string that is not empty")
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise ValueError(f"lora_int_id {shown(self.lora_int_id)} is not allowed: an integer above 0")
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


Adapters = LoRARequest | None | Sequence[LoRARequest | None]  # of all prompts, or in a list for each


def checked(found: Any) -> LoRARequest | None:
    """An argument that is a LoRARequest, or None. Raises TypeError for anything else."""
    if found is not None and not isinstance(found, LoRARequest):
        raise TypeError(f"lora_request is a LoRARequest or None, not {shown(found)}")
    return found
