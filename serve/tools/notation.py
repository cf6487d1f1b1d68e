"""How calls stand in a message: marks around them, and a form for each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from .source import Source, Steps, Text
from .tool import Tool


class Form(Protocol):
    """How one call is written; `opens` is what each begins with."""

    @property
    def opens(self) -> str: ...

    def call(self, source: Source, tools: Mapping[str, Tool]) -> Steps[bool]:
        """Gives out a call, if one comes next: up to its end, or that of the text. What was read stays to be
        given where none came."""
        ...


@dataclass(frozen=True)
class Notation:
    """Calls stand between `begin` and `end`, which is "" where nothing marks it, in one of several forms;
    where `is_bare`, a message may begin with one that has no mark. `most` calls are told from the text.

    Whatever is no call of one of the tools stays text, marks and all; white space around calls is nobody's.
    """

    begin: str
    end: str
    forms: tuple[Form, ...]
    is_bare: bool = False

    def events(self, source: Source, tools: Mapping[str, Tool], most: int) -> Steps[None]:
        """Gives out a message's text and calls."""
        count = 0
        if self.is_bare:
            yield from source.blank()
            yield from source.skip(self.begin)
            count = yield from self._section(source, tools, most)
        while count < most and (yield from said(source, self.begin)):
            count += yield from self._section(source, tools, most - count)
        yield from rest(source, count > 0)

    def _section(self, source: Source, tools: Mapping[str, Tool], most: int) -> Steps[int]:
        """Gives out what follows a mark, as far as it is calls; their number."""
        yield from source.blank()
        is_list = yield from source.skip("[")
        count, goes_on = 0, True
        while goes_on:
            yield from source.blank()
            form = yield from self._form(source)
            if form is None or not (yield from form.call(source, tools)):
                if source.at:
                    yield Text(source.given())
                break
            count += 1
            goes_on = yield from self._ended(source, form, is_list, count < most)
        return count

    def _form(self, source: Source) -> Steps[Form | None]:
        """The form whose opening comes next."""
        start = source.at
        for form in self.forms:
            found = yield from source.skip(form.opens)
            source.at = start
            if found:
                return form
        return None

    def _ended(self, source: Source, form: Form, is_list: bool, may_go_on: bool) -> Steps[bool]:
        """Reads what follows a call; whether that may be another one."""
        source.given()
        yield from source.blank()
        if may_go_on and (yield from source.skip_any((",", ";"))):
            return True
        if is_list and (yield from source.skip("]")):
            source.given()
            yield from source.blank()
        if self.end and (yield from source.skip(self.end)):
            source.given()
            return False
        start = source.at
        found = may_go_on and bool(form.opens) and (yield from source.skip(form.opens))
        source.at = start if found else 0
        return found


def said(source: Source, mark: str) -> Steps[bool]:
    """Gives out text up to a mark, which is read; whether it comes. White space before it is held."""
    while True:
        found = source.text.find(mark)
        end = len(source.text) - begun(source.text, mark) if found < 0 else found
        if kept := len(source.text[:end].rstrip()):
            source.at = kept
            yield Text(source.given())
        elif found >= 0 or source.is_over:
            source.at = found + len(mark) if found >= 0 else 0
            return found >= 0
        else:
            yield None


def rest(source: Source, is_bound: bool) -> Steps[None]:
    """Gives out all that comes; without the white space at its end, where it follows calls."""
    while True:
        holds = is_bound or not source.is_over
        if kept := len(source.text.rstrip() if holds else source.text):
            source.at = kept
            yield Text(source.given())
        elif source.is_over:
            return
        else:
            yield None


def begun(text: str, mark: str) -> int:
    """How many of a text's last characters may be the first ones of a mark."""
    return max(n for n in range(len(mark)) if text.endswith(mark[:n]))
