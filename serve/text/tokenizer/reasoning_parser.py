"""Reasoning parser: separates a model's reasoning from its answer, by the marks of its chat template."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ....checkpoints.dialects import ReasoningMarks
from .detokenizer import overlap_length
from .tokenizer import Tokenizer

MAX_GAP_NEWLINES = 2  # newlines that may stand between the reasoning and an answer under a grammar
PROMPT_TAIL_TOKENS = 32  # tokens at the end of a prompt, in which a template may have begun the reasoning


def are_marks_special(tokenizer: Tokenizer, marks: ReasoningMarks) -> bool:
    """Return whether marks of reasoning are lost in a text without special tokens."""
    return any(
        mark.strip() not in tokenizer.decode(tokenizer.encode(mark, add_special_tokens=False), True)
        for mark in (marks.begin, marks.end)
    )


@dataclass
class ReasoningParser:
    """Splitter of a completion's text into reasoning and answer, as it arrives.

    Only marks are dropped, and white space around the marks of the answer. Reasoning without an end mark ends
    before a tool call.

    marks: marks of the chat template around reasoning and answer
    is_open: whether the text is in the reasoning; None: not known yet
    is_marked: whether the answer has begun with a mark of its own; None: not known yet
    is_constrained: whether the answer is under a grammar, which begins behind up to MAX_GAP_NEWLINES newlines
    call_pattern: pattern of the beginning of a call, with a group, and of what may become one at the end
    """

    marks: ReasoningMarks
    is_open: bool | None = None
    is_marked: bool | None = None
    is_constrained: bool = False
    call_pattern: re.Pattern[str] | None = None
    _held: str = ""  # what may be part of a mark, or a call
    _gap_left: int = 0  # newlines that are still no part of the answer

    @classmethod
    def from_prompt(
        cls, tokenizer: Tokenizer, marks: ReasoningMarks, prompt_ids: Sequence[int]
    ) -> "ReasoningParser":
        """Return the parser for a prompt, which may end in the mark that begins or ends the reasoning, or
        that begins the answer."""
        tail = tokenizer.decode(prompt_ids[-PROMPT_TAIL_TOKENS:]).rstrip()
        if tail.endswith(marks.begin.rstrip()):
            return cls(marks, is_open=True)
        if tail.endswith(marks.end.rstrip()):
            return cls(marks, is_open=False)
        return cls(marks, False, True) if tail.endswith(marks.answer_begins) else cls(marks)

    def parse_chunk(self, text: str, at_end: bool = False) -> tuple[str, str]:
        """Take text, and return its reasoning and its answer."""
        text, self._held = self._held + text, ""
        if self.is_open is None:
            text = self._skip_begin_mark(text, at_end)
        thought = ""
        if self.is_open:
            thought, text = self._split_reasoning(text, at_end)
        if self._gap_left:
            text = self._skip_gap(text)
        return thought, "" if self.is_open else self._strip_answer_begin(text, at_end)

    def _skip_begin_mark(self, text: str, at_end: bool) -> str:
        """Return the text behind the mark that begins the reasoning. Returns "" until it is known whether the
        text begins with the mark."""
        bare, begin = text.lstrip(), self.marks.begin
        if bare.startswith(begin):
            self.is_open = True
            return bare[len(begin) :]
        if may_complete_mark(bare, (begin, *self.marks.answer_begins)) and not at_end:
            self._held = text
            return ""
        self.is_open = False
        return text

    def _split_reasoning(self, text: str, at_end: bool) -> tuple[str, str]:
        """Return the reasoning, and the text behind the mark that ends it. Without the mark a tool call ends
        the reasoning."""
        thought, end, rest = text.partition(self.marks.end)
        if end:
            self.is_open, self._gap_left = False, MAX_GAP_NEWLINES if self.is_constrained else 0
            return thought, rest
        call = None if self.call_pattern is None else self.call_pattern.search(text)
        cut = len(text) if call is None else call.start()
        if not at_end:
            cut = min(cut, len(text) - overlap_length(text, (self.marks.end,)))
            self._held = text[cut:]
        elif call is not None and call.lastindex:
            self.is_open = False
            return text[:cut], text[cut:]
        return text if at_end else text[:cut], ""

    def _skip_gap(self, text: str) -> str:
        """Return the text without the newlines of the gap, which the first other character ends."""
        rest = text[: self._gap_left].lstrip("\n") + text[self._gap_left :]
        self._gap_left = 0 if rest else self._gap_left - len(text)
        return rest

    def _strip_answer_begin(self, text: str, at_end: bool) -> str:
        if self.is_marked is None:
            bare = text.lstrip()
            answer_begin = next((mark for mark in self.marks.answer_begins if bare.startswith(mark)), None)
            if answer_begin is None and may_complete_mark(bare, self.marks.answer_begins) and not at_end:
                self._held += text
                return ""
            self.is_marked = answer_begin is not None
            text = text if answer_begin is None else bare[len(answer_begin) :]
        return self._strip_answer_end(text, at_end) if self.is_marked and self.marks.answer_end else text

    def _strip_answer_end(self, text: str, at_end: bool) -> str:
        """Return the answer without its closing mark, which only white space may follow."""
        mark = self.marks.answer_end
        answer, end, rest = text.rpartition(mark)
        if not end or rest.strip():
            answer = text[: len(text) - overlap_length(text, (mark,))]
        if at_end:
            return answer if end and not rest.strip() else text
        self._held = text[len(answer) :]
        return answer


def may_complete_mark(text: str, marks: Iterable[str]) -> bool:
    """Return whether more text may complete one of the marks."""
    return any(mark.startswith(text) for mark in marks)
