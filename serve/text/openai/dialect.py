"""How a model writes its replies to chats: what its template says of reasoning and of calls of tools."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ....checkpoints.dialects import Marks
from ....sampling.structured import StructuredOutputsParams
from ..tokenizer.reasoning import Reasoning, are_special, marks_of
from ..tokenizer.tokenizer import Tokenizer
from ..tools.lark import Lark
from ..tools.tool import Toolbox
from ..tools.tool_format import ToolFormat
from ..tools.tool_parsers import format_named, template_format
from .errors import RequestError


@dataclass(frozen=True)
class Dialect:
    """Of a tokenizer's chat template; `parser` names the notation of calls in its place."""

    tokenizer: Tokenizer | None = None
    parser: str | None = None

    @cached_property
    def marks(self) -> Marks | None:
        """Those of the reasoning, where the model may reason."""
        return marks_of(self.tokenizer)

    @cached_property
    def keeps_special(self) -> bool:
        """Whether marks of the reasoning are special tokens."""
        return (
            self.tokenizer is not None and self.marks is not None and are_special(self.tokenizer, self.marks)
        )

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """That of calls, where there is one that can be read."""
        if self.parser is not None:
            return format_named(self.parser)
        template = None if self.tokenizer is None else self.tokenizer.template_for(None, True)
        return None if template is None else template_format(template)

    def reasoning(self, prompt_ids: Sequence[int]) -> Reasoning | None:
        """What tells the reasoning of a reply to a prompt from the rest."""
        if self.tokenizer is None or self.marks is None:
            return None
        return Reasoning.after(self.tokenizer, self.marks, prompt_ids)

    def require_tool_format(self) -> ToolFormat:
        """The notation of calls. Raises RequestError where there is none."""
        if self.tool_format is None:
            raise RequestError(
                "invalid_request",
                "tools is not allowed: this model's chat template has no notation of calls that can be read, "
                "and --tool-call-parser names none",
                "tools",
            )
        return self.tool_format

    @cached_property
    def calls_special(self) -> bool:
        """Whether marks of calls are special tokens. Raises RequestError where there is no notation."""
        found = self.require_tool_format()
        return "<[" in Lark(self._special).text(found.begin + found.end)

    def constraints(self, toolbox: Toolbox, prompt_ids: Sequence[int]) -> StructuredOutputsParams:
        """What a reply is like that must call tools: before the calls there may be reasoning.

        Raises RequestError where there is no notation.
        """
        lark = Lark(self._special)
        several = toolbox.is_several and toolbox.only is None
        calls = self.require_tool_format().grammar(toolbox.tools, several, lark)
        return StructuredOutputsParams(grammar=lark.grammar(self._thought(prompt_ids, lark) + calls))

    def _thought(self, prompt_ids: Sequence[int], lark: Lark) -> str:
        """Terms for reasoning, which must come to its end where the prompt has begun it."""
        reasoning = self.reasoning(prompt_ids)
        if reasoning is None or reasoning.is_open is False:
            return ""
        marks = reasoning.marks
        if self._special(marks.end) is None:
            thought = lark.rule("/(?s:.*)/", f"[suffix={lark.quoted(marks.end)}]")
        else:
            thought = lark.rule(f"/(?s:.*)/ {lark.text(marks.end)}")
        thought = f"{thought} /\\n{{0,2}}/ "
        return thought if reasoning.is_open else f"({lark.text(marks.begin)} {thought})? "

    def _special(self, token: str) -> int | None:
        """The id of a special token of this name."""
        id = None if self.tokenizer is None else self.tokenizer.token_id(token)
        return id if self.tokenizer is not None and id in self.tokenizer.special_ids else None
