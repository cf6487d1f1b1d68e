"""How calls stand in a message: marks around them, and a form for each."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from .incoming import Incoming, Steps, TextDelta
from .lark import Lark
from .tool import Tool


class Form(Protocol):
    """How one call is written; `opens` is what each begins with."""

    @property
    def opens(self) -> str: ...

    def call(self, coming: Incoming, tools: Mapping[str, Tool]) -> Steps[bool]:
        """Gives out a call, if one comes next: up to its end, or that of the text. What was read stays to be
        given where none came."""
        ...

    def written(self, tool: Tool, lark: Lark) -> str:
        """Terms of a grammar for a call of a tool."""
        ...


@dataclass(frozen=True)
class CallLayout:
    """How calls stand between their marks: in one of several `forms`, of which the last is written, with
    `opens` before them and `closes` behind. Several are written with `between` from call to call or, where it
    is None, each between marks of its own, with `apart` before the next.

    Where a layout `is_bare`, a message may begin with calls that have no marks, and is written so. Ids of
    calls that are short have nine letters and digits.
    """

    forms: tuple[Form, ...]
    opens: str = ""
    closes: str = ""
    between: str | None = None
    apart: str = "\n"
    is_bare: bool = False
    has_short_ids: bool = False


@dataclass(frozen=True)
class Notation:
    """Calls stand between `begin` and `end`, which is "" where nothing marks it.

    Whatever is no call of one of the tools stays text, marks and all; white space around calls is nobody's.
    """

    begin: str
    end: str
    layout: CallLayout

    def grammar(self, tools: Iterable[Tool], is_several: bool, lark: Lark) -> str:
        """Terms for one call of one of the tools, or for several."""
        layout = self.layout
        one = lark.one_of(layout.forms[-1].written(tool, lark) for tool in tools)
        begin, end = ("", "") if layout.is_bare else (self.begin, self.end)
        before, after = lark.text(begin + layout.opens), lark.text(layout.closes + end)
        if not is_several:
            return f"{before} {one} {after}"
        if layout.between is None:
            section = lark.rule(f"{before} {one} {after}")
            return f"{section} ({lark.text(layout.apart)} {section})*"
        return f"{before} {one} ({lark.text(layout.between)} {one})* {after}"

    def events(self, coming: Incoming, tools: Mapping[str, Tool], most: int) -> Steps[None]:
        """Gives out a message's text and calls, of which there are at most so many."""
        count = 0
        if self.layout.is_bare:
            yield from coming.blank()
            yield from coming.skip(self.begin)
            count = yield from self._section(coming, tools, most)
        while count < most and (yield from consumed(coming, self.begin)):
            count += yield from self._section(coming, tools, most - count)
        yield from rest(coming, count > 0)

    def _section(self, coming: Incoming, tools: Mapping[str, Tool], most: int) -> Steps[int]:
        """Gives out what follows a mark, as far as it is calls; their number."""
        yield from coming.blank()
        is_list = yield from coming.skip("[")
        count, goes_on = 0, True
        while goes_on:
            yield from coming.blank()
            form = yield from self._form(coming)
            if form is None or not (yield from form.call(coming, tools)):
                if coming.at:
                    yield TextDelta(coming.given())
                break
            count += 1
            goes_on = yield from self._ended(coming, form, is_list, count < most)
        return count

    def _form(self, coming: Incoming) -> Steps[Form | None]:
        """The form whose opening comes next."""
        start = coming.at
        for form in sorted(self.layout.forms, key=lambda form: -len(form.opens)):
            found = yield from coming.skip(form.opens)
            coming.at = start
            if found:
                return form
        return None

    def _ended(self, coming: Incoming, form: Form, is_list: bool, may_go_on: bool) -> Steps[bool]:
        """Reads what follows a call; whether that may be another one."""
        coming.given()
        yield from coming.blank()
        if may_go_on and (yield from coming.skip_any((",", ";"))):
            return True
        if is_list and (yield from coming.skip("]")):
            coming.given()
            yield from coming.blank()
        if self.end and (yield from coming.skip(self.end)):
            coming.given()
            return False
        start = coming.at
        found = may_go_on and bool(form.opens) and (yield from coming.skip(form.opens))
        coming.at = start if found else 0
        return found


def consumed(coming: Incoming, mark: str) -> Steps[bool]:
    """Gives out text up to a mark, which is read; whether it comes. White space before it is held."""
    while True:
        found = coming.text.find(mark)
        end = len(coming.text) - begun(coming.text, mark) if found < 0 else found
        if kept := len(coming.text[:end].rstrip()):
            coming.at = kept
            yield TextDelta(coming.given())
        elif found >= 0 or coming.is_over:
            coming.at = found + len(mark) if found >= 0 else 0
            return found >= 0
        else:
            yield None


def rest(coming: Incoming, is_bound: bool) -> Steps[None]:
    """Gives out all that comes; without the white space at its end, where it follows calls."""
    while True:
        holds = is_bound or not coming.is_over
        if kept := len(coming.text.rstrip() if holds else coming.text):
            coming.at = kept
            yield TextDelta(coming.given())
        elif coming.is_over:
            return
        else:
            yield None


def begun(text: str, mark: str) -> int:
    """How many of a text's last characters may be the first ones of a mark."""
    return max(n for n in range(len(mark)) if text.endswith(mark[:n]))
