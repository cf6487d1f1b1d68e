"""The tools of a request, and what it wants to be called."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from .lark import Lark
from .notation import Notation
from .tool import Tool

Choice = Literal["none", "auto", "required"]


@dataclass(frozen=True)
class Toolbox:
    """Tools as a body of OpenAI's has them, for chat templates: none of them may be called, any may, one or
    more must, or `only` the one of this name; `is_several` says whether there may be several calls."""

    given: Sequence[Mapping[str, Any]]
    choice: Choice = "auto"
    only: str | None = None
    is_several: bool = True

    @property
    def is_forced(self) -> bool:
        """Whether a call must come."""
        return self.choice == "required"

    @cached_property
    def tools(self) -> tuple[Tool, ...]:
        """Those that may be called."""
        functions = [tool["function"] for tool in self.given] if self.choice != "none" else []
        found = (Tool(one["name"], one.get("parameters") or {}) for one in functions)
        return tuple(tool for tool in found if self.only in (None, tool.name))

    def terms(self, notation: Notation, lark: Lark) -> str:
        """Terms of a grammar for calls that must come: of a tool that was named there is one."""
        return notation.grammar(self.tools, self.is_several and self.only is None, lark)
