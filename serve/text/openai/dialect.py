"""The dialect in which a model writes replies to chats: its marks of reasoning and its format of tool
calls."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ....checkpoints.dialects import Marks, marks_of
from ....sampling.structured import StructuredOutputsParams
from ..grammar.compiled import within
from ..tokenizer.reasoning import GAP, Reasoning, are_special
from ..tokenizer.tokenizer import Tokenizer
from ..tools.formats import format_named, template_format
from ..tools.lark import Lark, quoted
from ..tools.tool import Toolbox
from ..tools.tool_parser import ToolFormat
from .errors import RequestError


@dataclass(frozen=True)
class Dialect:
    """The dialect of a tokenizer's chat template; `parser` names another format of calls."""

    tokenizer: Tokenizer | None = None
    parser: str | None = None

    @cached_property
    def marks(self) -> Marks | None:
        """Marks of the reasoning, if the model reasons."""
        template = None if self.tokenizer is None else self.tokenizer.chat_template
        return None if template is None else marks_of(template)

    @cached_property
    def keeps_special(self) -> bool:
        """True if marks of the reasoning are special tokens."""
        return (
            self.tokenizer is not None and self.marks is not None and are_special(self.tokenizer, self.marks)
        )

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """The format of calls, if there is one that can be read."""
        if self.parser is not None:
            return format_named(self.parser)
        template = None if self.tokenizer is None else self.tokenizer.template_for(None, True)
        return None if template is None else template_format(template)

    def reasoning(self, prompt_ids: Sequence[int], is_constrained: bool = False) -> Reasoning | None:
        """Return the parser that separates the reasoning in a reply to this prompt, whose answer may be
        constrained by a grammar."""
        if self.tokenizer is None or self.marks is None:
            return None
        found = Reasoning.after(self.tokenizer, self.marks, prompt_ids)
        return replace(found, is_constrained=is_constrained)

    def require_tool_format(self) -> ToolFormat:
        """Return the format of calls. Raises RequestError if there is none."""
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
        """True if marks of calls are special tokens. Raises RequestError without a format of calls."""
        found = self.require_tool_format()
        return "<[" in Lark(self._special).text(found.begin + found.end)

    def constraints(self, toolbox: Toolbox, prompt_ids: Sequence[int]) -> StructuredOutputsParams:
        """Return the grammar of a reply that must call tools; reasoning may precede the calls. Raises
        RequestError without a format of calls."""
        lark = Lark(self._special)
        several = toolbox.is_several and toolbox.only is None
        calls = self.require_tool_format().grammar(toolbox.tools, several, lark)
        return StructuredOutputsParams(grammar=lark.grammar(self._thought(prompt_ids, lark) + calls))

    def after_reasoning(
        self, params: StructuredOutputsParams, prompt_ids: Sequence[int]
    ) -> StructuredOutputsParams:
        """Return the grammar of a reply whose answer is constrained: reasoning, and the marks of the answer,
        may come before. Raises ValueError for a constraint that is no grammar."""
        lark, reasoning = Lark(self._special), self.reasoning(prompt_ids)
        if reasoning is None or reasoning.is_open is False:
            return params
        opens, closes = reasoning.marks.opens, reasoning.marks.closes
        before = f"{lark.one_of(map(lark.text, opens))}? " if opens else ""
        after = f" ({lark.text(closes)})?" if closes else ""
        before = self._thought(prompt_ids, lark) + before
        return within(lambda name: lark.grammar(f"{before}@{name}{after}"), params)

    def _thought(self, prompt_ids: Sequence[int], lark: Lark) -> str:
        """Return terms for reasoning, which must end if the prompt has begun it."""
        reasoning = self.reasoning(prompt_ids)
        if reasoning is None or reasoning.is_open is False:
            return ""
        marks = reasoning.marks
        if self._special(marks.end) is None:
            thought = lark.rule("/(?s:.*)/", f"[suffix={quoted(marks.end)}]")
        else:
            thought = lark.rule(f"/(?s:.*)/ {lark.text(marks.end)}")
        thought = f"{thought} /\\n{{0,{GAP}}}/ "
        return thought if reasoning.is_open else f"({lark.text(marks.begin)} {thought})? "

    def _special(self, token: str) -> int | None:
        id = None if self.tokenizer is None else self.tokenizer.token_id(token)
        return id if self.tokenizer is not None and id in self.tokenizer.special_ids else None
