"""The dialect in which a model writes replies to chats: its marks of reasoning and its format of tool
calls."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ....checkpoints.dialects import ReasoningMarks, find_reasoning_marks
from ....sampling.structured import StructuredOutputsParams
from ..grammar.grammar_cache import wrap_grammar
from ..tokenizer.reasoning_parser import MAX_GAP_NEWLINES, ReasoningParser, are_marks_special
from ..tokenizer.tokenizer import Tokenizer
from ..tools.formats import find_template_format, find_tool_format
from ..tools.lark import Lark, quote_json
from ..tools.tool import Toolbox
from ..tools.tool_parser import ToolFormat
from .errors import RequestError


@dataclass(frozen=True)
class Dialect:
    """Dialect of a model's replies.

    tokenizer: tokenizer whose chat template decides; None: no dialect
    parser_name: name of a format of tool calls; None: the format of the chat template
    """

    tokenizer: Tokenizer | None = None
    parser_name: str | None = None

    @cached_property
    def reasoning_marks(self) -> ReasoningMarks | None:
        """Marks of the reasoning, if the model reasons."""
        template = None if self.tokenizer is None else self.tokenizer.chat_template
        return None if template is None else find_reasoning_marks(template)

    @cached_property
    def has_special_reasoning_marks(self) -> bool:
        """True if marks of the reasoning are special tokens."""
        return (
            self.tokenizer is not None
            and self.reasoning_marks is not None
            and are_marks_special(self.tokenizer, self.reasoning_marks)
        )

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """The format of calls, if there is one that can be read."""
        if self.parser_name is not None:
            return find_tool_format(self.parser_name)
        template = None if self.tokenizer is None else self.tokenizer.get_chat_template(None, True)
        return None if template is None else find_template_format(template)

    def make_reasoning_parser(
        self, prompt_ids: Sequence[int], is_constrained: bool = False
    ) -> ReasoningParser | None:
        """Return the parser that separates the reasoning in a reply to this prompt; None without reasoning.
        `is_constrained`: a grammar constrains the answer."""
        if self.tokenizer is None or self.reasoning_marks is None:
            return None
        parser = ReasoningParser.from_prompt(self.tokenizer, self.reasoning_marks, prompt_ids)
        return replace(parser, is_constrained=is_constrained)

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
    def has_special_call_marks(self) -> bool:
        """True if marks of calls are special tokens. Raises RequestError without a format of calls."""
        tool_format = self.require_tool_format()
        return "<[" in Lark(self._special_id).text_terms(tool_format.begin + tool_format.end)

    def call_grammar(self, toolbox: Toolbox, prompt_ids: Sequence[int]) -> StructuredOutputsParams:
        """Return the grammar of a reply that must call tools; reasoning may precede the calls. Raises
        RequestError without a format of calls, and for a schema that a grammar cannot keep."""
        lark, form = Lark(self._special_id), self.require_tool_format()
        allows_parallel_calls = toolbox.allows_parallel_calls and toolbox.forced_name is None
        try:
            calls = form.grammar_terms(toolbox.tools, allows_parallel_calls, lark)
        except (ValueError, TypeError, RecursionError) as error:
            raise RequestError("invalid_request", f"tools is not allowed: {error}", "tools") from None
        return StructuredOutputsParams(grammar=lark.to_text(self._reasoning_terms(prompt_ids, lark) + calls))

    def grammar_with_reasoning(
        self, params: StructuredOutputsParams, prompt_ids: Sequence[int]
    ) -> StructuredOutputsParams:
        """Return the grammar of a reply with a constrained answer, before which reasoning and the marks of
        the answer may come. Raises ValueError for a constraint that is no grammar."""
        lark, reasoning = Lark(self._special_id), self.make_reasoning_parser(prompt_ids)
        if reasoning is None or reasoning.is_open is False:
            return params
        opens, closes = reasoning.marks.answer_begins, reasoning.marks.answer_end
        before_terms = f"{lark.add_alternatives(map(lark.text_terms, opens))}? " if opens else ""
        after_terms = f" ({lark.text_terms(closes)})?" if closes else ""
        before_terms = self._reasoning_terms(prompt_ids, lark) + before_terms
        return wrap_grammar(lambda name: lark.to_text(f"{before_terms}@{name}{after_terms}"), params)

    def _reasoning_terms(self, prompt_ids: Sequence[int], lark: Lark) -> str:
        """Return terms of a grammar for the reasoning; "" without it. It must end if the prompt has begun
        it."""
        reasoning = self.make_reasoning_parser(prompt_ids)
        if reasoning is None or reasoning.is_open is False:
            return ""
        marks = reasoning.marks
        if self._special_id(marks.end) is None:
            terms = lark.add_rule("/(?s:.*)/", f"[suffix={quote_json(marks.end)}]")
        else:
            terms = lark.add_rule(f"/(?s:.*)/ {lark.text_terms(marks.end)}")
        terms = f"{terms} /\\n{{0,{MAX_GAP_NEWLINES}}}/ "
        return terms if reasoning.is_open else f"({lark.text_terms(marks.begin)} {terms})? "

    def _special_id(self, token: str) -> int | None:
        id = None if self.tokenizer is None else self.tokenizer.token_id(token)
        return id if self.tokenizer is not None and id in self.tokenizer.special_ids else None
