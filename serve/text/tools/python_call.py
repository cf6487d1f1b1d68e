"""Calls as Python writes them: `[f(x=1), g()]`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .argument_writer import ArgumentWriter
from .call_forms import is_name_character
from .lark import Lark
from .literals import PythonScan, literal_to_json, partial_literal_to_json, value_to_json
from .parameter_terms import check_parameter_names, python_arguments_term
from .stream_reader import Steps, TextDelta, TextReader, ToolCallEnd, ToolCallStart
from .tool import Tool


@dataclass(frozen=True)
class PythonCall:
    """A call as Python or, with values of JSON, OLMo 3 writes it, as `f(x=1, y=[True, None])`; both are read.

    words: values of JSON that are written as Python's
    """

    words: Mapping[str, str] = field(default_factory=dict)
    begin: str = ""
    prefix: str = ""
    strays: tuple[str, ...] = (")",)
    marks: tuple[str, ...] = ()

    def is_call_start(self, reader: TextReader, is_marked: bool) -> Steps[bool]:
        name = (yield from reader.read_while(is_name_character)) if is_marked else ""
        return bool(name) and (yield from reader.skip("("))

    def parse_call(self, reader: TextReader, tools: Mapping[str, Tool]) -> Steps[bool]:
        tool = tools.get((yield from reader.read_while(is_name_character)))
        if tool is None or not (yield from reader.skip("(")):
            return False
        reader.consume()
        yield ToolCallStart(tool.name)
        arguments, is_whole, names, text = ArgumentWriter(), True, iter(tool.properties), ""
        while is_whole and (yield from self._skip_to_argument(reader)):
            key = yield from self._read_key(reader)
            value, is_whole = yield from read_python_literal(reader)
            if key is None and not is_whole and value[:1] not in ('"', "[", "{"):
                reader.pos = len(reader.text[: reader.pos].rstrip())
                text = reader.consume()  # a name, perhaps
                break
            key = next(names, None) if key is None else key
            if key is not None:
                reader.consume()
                yield from arguments.write_argument(key, value)
        yield from arguments.write_end(is_whole and (yield from self._read_arguments_end(reader)))
        yield ToolCallEnd()
        if text:
            yield TextDelta(text)
        return True

    def _skip_to_argument(self, reader: TextReader) -> Steps[bool]:
        """Read up to the next argument; return whether there is one."""
        yield from reader.skip_space()
        if (yield from reader.skip(",")):
            yield from reader.skip_space()
        return (yield from reader.peek()) not in ("", ")", ",")

    def _read_key(self, reader: TextReader) -> Steps[str | None]:
        """Read up to an argument's value; return its name, None for one that its position names."""
        start = reader.pos
        key = yield from reader.read_while(is_name_character)
        yield from reader.skip_space()
        if key and (yield from reader.skip("=")):
            yield from reader.skip_space()
            return key
        reader.pos = start
        return None

    def _read_arguments_end(self, reader: TextReader) -> Steps[bool]:
        """Read the end of the arguments; return whether they have one: anything but the end of the text."""
        if (yield from reader.skip(")")):
            return True
        is_cut = not (yield from reader.has_more())
        reader.pos = 0
        return not is_cut

    def grammar_terms(self, tool: Tool, lark: Lark) -> str:
        """Return terms for a call: the arguments in their order. An argument that is not required may be
        missing."""
        check_parameter_names(tool.grammar_parameters, lambda name: all(map(is_name_character, name)))
        return f'{lark.text_terms(f"{tool.name}(")} {python_arguments_term(tool, self.words, lark)} ")"'


PYTHON_WORDS = {"true": "True", "false": "False", "null": "None"}


def read_python_literal(reader: TextReader) -> Steps[tuple[str, bool]]:
    """Read a literal of Python or JSON. Return it as JSON, and whether it is whole; if it is cut, return as
    much JSON as there is."""
    start = reader.pos
    is_whole = yield from reader.scan_value(PythonScan())
    text = reader.text[start : reader.pos].strip()
    if not is_whole and (yield from reader.is_at_mark()) and (yield from reader.has_more()):
        is_whole = literal_to_json(text) is not None
    return value_to_json(text) if is_whole else partial_literal_to_json(text), is_whole
