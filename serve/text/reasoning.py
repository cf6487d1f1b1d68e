"""What a model thinks before it answers, told from the answer by the marks of its chat template."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .tokenizer import Tokenizer

TAIL = 16  # tokens at the end of a prompt, in which a template may have begun the reasoning


class Marks(NamedTuple):
    """What stands before and after reasoning."""

    begin: str
    end: str


MARKS = Marks("<think>", "</think>"), Marks("[THINK]", "[/THINK]"), Marks("<seed:think>", "</seed:think>")


def marks_of(tokenizer: Tokenizer | None) -> Marks | None:
    """The marks that a chat template knows, if it knows any."""
    template = "" if tokenizer is None else tokenizer.chat_template or ""
    return next((marks for marks in MARKS if marks.end in template), None)


def is_begun(tokenizer: Tokenizer, marks: Marks, prompt_ids: Sequence[int]) -> bool:
    """Whether a prompt ends in the mark that begins reasoning."""
    return tokenizer.decode(prompt_ids[-TAIL:]).rstrip().endswith(marks.begin)


@dataclass
class Reasoning:
    """Parts a completion's text as it comes. `is_open` says whether it is in its reasoning, None as long as
    nobody knows; no text but the marks is lost."""

    marks: Marks
    is_open: bool | None = None
    _held: str = ""  # what may be part of a mark

    def take(self, text: str, at_end: bool = False) -> tuple[str, str]:
        """The reasoning and the answer in what has come since."""
        text, self._held = self._held + text, ""
        if self.is_open is None:
            text = self._begun(text, at_end)
        if not self.is_open:
            return "", text
        thought, found, answer = text.partition(self.marks.end)
        if found:
            self.is_open = False
        elif not at_end:
            cut = len(thought) - begun_mark(thought, self.marks.end)
            thought, self._held = thought[:cut], thought[cut:]
        return thought, answer

    def _begun(self, text: str, at_end: bool) -> str:
        """What follows the first mark; nothing while that is not all here."""
        bare, begin = text.lstrip(), self.marks.begin
        if bare.startswith(begin):
            self.is_open = True
            return bare[len(begin) :]
        if begin.startswith(bare) and not at_end:
            self._held = text
            return ""
        self.is_open = False
        return text


def begun_mark(text: str, mark: str) -> int:
    """How many of a text's last characters may be the first ones of a mark."""
    return max(n for n in range(len(mark)) if text.endswith(mark[:n]))
