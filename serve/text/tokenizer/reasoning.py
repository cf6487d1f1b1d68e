"""Reasoning parser: separates a model's reasoning from its answer, by the marks of its chat template."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ....checkpoints.dialects import Marks
from .detokenizer import overlap
from .tokenizer import Tokenizer

GAP = 2  # newlines that may stand between the reasoning and an answer under a grammar
TAIL = 32  # tokens at the end of a prompt, in which a template may have begun the reasoning


def are_special(tokenizer: Tokenizer, marks: Marks) -> bool:
    """Return whether marks of reasoning are lost in a text without special tokens."""
    return any(
        mark.strip() not in tokenizer.decode(tokenizer.encode(mark, add_special_tokens=False), True)
        for mark in (marks.begin, marks.end)
    )


@dataclass
class Reasoning:
    """Splits a completion's text as it arrives. Only marks are lost, and white space around those of the
    answer.

    is_open: whether the text is in the reasoning; None: not known yet
    is_marked: whether the answer has begun with a mark of its own; None: not known yet
    is_constrained: whether the answer is under a grammar, which begins behind up to GAP newlines
    """

    marks: Marks
    is_open: bool | None = None
    is_marked: bool | None = None
    is_constrained: bool = False
    _held: str = ""  # what may be part of a mark
    _gap: int = 0  # newlines that are still no part of the answer

    @classmethod
    def after(cls, tokenizer: Tokenizer, marks: Marks, prompt_ids: Sequence[int]) -> "Reasoning":
        """Return the parser for a prompt, which may end in the mark that begins or ends the reasoning, or
        that begins the answer."""
        tail = tokenizer.decode(prompt_ids[-TAIL:]).rstrip()
        if tail.endswith(marks.begin.rstrip()):
            return cls(marks, is_open=True)
        if tail.endswith(marks.end.rstrip()):
            return cls(marks, is_open=False)
        return cls(marks, False, True) if tail.endswith(marks.opens) else cls(marks)

    def take(self, text: str, at_end: bool = False) -> tuple[str, str]:
        """Take text, and return its reasoning and its answer."""
        text, self._held = self._held + text, ""
        if self.is_open is None:
            text = self._begun(text, at_end)
        thought = ""
        if self.is_open:
            thought, text = self._thought(text, at_end)
        if self._gap:
            text = self._past_gap(text)
        return thought, "" if self.is_open else self._answer(text, at_end)

    def _begun(self, text: str, at_end: bool) -> str:
        """Return the text behind the mark that begins the reasoning; nothing until it is known which comes
        first."""
        bare, begin = text.lstrip(), self.marks.begin
        if bare.startswith(begin):
            self.is_open = True
            return bare[len(begin) :]
        if may_become(bare, (begin, *self.marks.opens)) and not at_end:
            self._held = text
            return ""
        self.is_open = False
        return text

    def _thought(self, text: str, at_end: bool) -> tuple[str, str]:
        """Return the reasoning, and the text behind the mark that ends it."""
        thought, found, rest = text.partition(self.marks.end)
        if found:
            self.is_open, self._gap = False, GAP if self.is_constrained else 0
        elif not at_end:
            cut = len(thought) - overlap(thought, (self.marks.end,))
            thought, self._held = thought[:cut], thought[cut:]
        return thought, rest

    def _past_gap(self, text: str) -> str:
        """Return the text without the newlines of the gap, which the first other character ends."""
        rest = text[: self._gap].lstrip("\n") + text[self._gap :]
        self._gap = 0 if rest else self._gap - len(text)
        return rest

    def _answer(self, text: str, at_end: bool) -> str:
        if self.is_marked is None:
            bare = text.lstrip()
            found = next((mark for mark in self.marks.opens if bare.startswith(mark)), None)
            if found is None and may_become(bare, self.marks.opens) and not at_end:
                self._held += text
                return ""
            self.is_marked = found is not None
            text = text if found is None else bare[len(found) :]
        return self._closed(text, at_end) if self.is_marked and self.marks.closes else text

    def _closed(self, text: str, at_end: bool) -> str:
        """Return the answer without its closing mark, which only white space may follow."""
        mark = self.marks.closes
        answer, found, rest = text.rpartition(mark)
        if not found or rest.strip():
            answer = text[: len(text) - overlap(text, (mark,))]
        if at_end:
            return answer if found and not rest.strip() else text
        self._held = text[len(answer) :]
        return answer


def may_become(text: str, marks: Iterable[str]) -> bool:
    """Return whether more text may complete one of the marks."""
    return any(mark.startswith(text) for mark in marks)
