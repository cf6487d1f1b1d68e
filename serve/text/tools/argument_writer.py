"""Writer of a call's arguments as an object of JSON, while they are read one by one."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from .lark import quote_json
from .stream_reader import ToolCallArguments


@dataclass
class ArgumentWriter:
    """Writer of arguments as an object of JSON, each when the next one begins. If a key is repeated at once,
    the last value counts; a later repetition is dropped."""

    _keys: set[str] = field(default_factory=set)
    _last: tuple[str, str] | None = None

    def write_argument(self, key: str, value: str) -> Iterator[ToolCallArguments]:
        if self._last is not None and self._last[0] != key:
            yield from self._write_last()
        if key not in self._keys:
            self._last = key, value

    def write_end(self, is_whole: bool) -> Iterator[ToolCallArguments]:
        """Yield the rest; without the bracket at its end if it is not whole."""
        yield from self._write_last()
        yield ToolCallArguments("{" * (not self._keys) + "}" * is_whole)

    def _write_last(self) -> Iterator[ToolCallArguments]:
        if self._last is not None:
            key, value = self._last
            yield ToolCallArguments(f"{', ' if self._keys else '{'}{quote_json(key)}: {value}")
            self._keys.add(key)
            self._last = None
