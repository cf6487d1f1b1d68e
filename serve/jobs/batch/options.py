"""How a job is run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ....lora.request import LoRARequest


@dataclass(frozen=True)
class BatchOptions:
    """How a job is run. `in_flight` lines are in the engine at once (four times max_num_seqs keeps it busy).

    Lines without a seed get one from `seed` and their number; `sampling` holds parameters of lines that do
    not give them; `model_name` is the model's name in answers to lines that name none; a line of more than
    `max_line_bytes` is answered with an error; `explain` adds a table of the compiled programs to the report;
    `save_cache` is a folder for what the engine's cache holds at the end; `adapters` are those that a line
    may name as its model; `tool_call_parser` names the notation of calls.
    """

    in_flight: int = 128
    seed: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    model_name: str = "duetto"
    max_line_bytes: int = 8 << 20
    progress: bool = True
    explain: bool = False
    save_cache: str | None = None
    adapters: Mapping[str, LoRARequest] = field(default_factory=dict)
    tool_call_parser: str | None = None
