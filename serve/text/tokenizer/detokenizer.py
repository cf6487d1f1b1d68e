"""Incremental detokenization, and stop strings."""

from array import array
from collections.abc import Iterable, Sequence

from .tokenizer import Tokenizer


class Detokenizer:
    """Makes text of a request's tokens as they arrive, and finds stop strings in it.

    `push` returns only text that no later token can change and that cannot be the beginning of a stop string.
    The pushes and `finish` together are the text, however the ids were divided. Without a stop it is the text
    that the tokenizer decodes from all ids at once; after `prompt_ids`, what it adds to the prompt's text,
    with a leading space. A character whose bytes begin in the prompt is not completed.

    Stop strings are searched after every token. Character by character, the one that is complete first wins;
    of several that end together, the longest. The text ends before it, or behind it with
    `include_stop_str_in_output`. A stop *token* is handled by the caller, who pushes its id only if its text
    belongs to the output.

    stop_hit: the stop string found, or None
    tokens_used: ids consumed, including the one that completed the stop string
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        *,
        prompt_ids: Sequence[int] = (),
    ):
        assert all(stop), "an empty stop string matches everywhere"
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stops = tuple(stop)
        self._begun = [StopPrefix(one) for one in stop]
        self._include = include_stop_str_in_output
        self._stream = tokenizer.stream(prompt_ids, skip_special_tokens)
        self._pieces: list[str] = []
        self._held = ""  # end of the final text that may begin a stop string
        self._length = 0  # of the final text, held part included
        self._floor = 0  # a stop string must end beyond this position
        self.stop_hit: str | None = None
        self.tokens_used = 0

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def after(self, pieces: int) -> tuple[str, int]:
        """Return the text after the first `pieces` pieces, and the number of pieces."""
        return "".join(self._pieces[pieces:]), len(self._pieces)

    def push(self, ids: Iterable[int], below_min: int = 0) -> str:
        """Take ids, up to the one that completes a stop string; return the text that became final. The first
        `below_min` ids are among the request's first `min_tokens`: a stop string must end behind their
        text."""
        pieces = []
        for i, token_id in enumerate(ids):
            if self.stop_hit is not None:
                break
            self.tokens_used += 1
            token = self._tokenizer.keeps(token_id, self._skip)
            new = "" if token is None else self._stream.push(token_id, token)
            pieces.append(self._extend(new, i < below_min))
        return self._give("".join(pieces))

    def finish(self) -> str:
        """End the text: return the held part. Nothing is left after a stop string."""
        if self.stop_hit is not None:
            return ""
        held = "" if self._include else self._held
        self._held = ""
        return self._give(held + self._stream.finish())

    def _give(self, text: str) -> str:
        self._pieces.append(text)
        return text

    def _extend(self, new: str, below_min: bool) -> str:
        """Add final text; return the part of it, and of the held text, that can be returned."""
        if not self._stops:
            return new
        final = self._held + new
        begin = self._length - len(self._held)
        given = len(self._held) if self._include else 0
        self._length += len(new)
        seen = final + self._stream.pending
        if below_min:
            self._floor = begin + len(seen)
        elif match := first_match(seen, self._stops, max(self._floor - begin, len(self._held))):
            start, end = match
            self.stop_hit = seen[start:end]
            return seen[given : end if self._include else start]
        longest = max(begun.push(new) for begun in self._begun)
        self._held = final[len(final) - longest :]
        return final[given : len(final) - (0 if self._include else len(self._held))]


def first_match(text: str, stops: Sequence[str], floor: int) -> tuple[int, int] | None:
    """Return start and end of the stop string that ends first beyond `floor`; of those that end together, the
    longest."""
    found = []
    for stop in stops:
        start = text.find(stop, max(0, floor - len(stop) + 1))
        if start >= 0:
            found.append((start + len(stop), start))
    end, start = min(found, default=(0, 0))
    return (start, end) if end else None


def overlap(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of the text that is a proper beginning of a stop string."""
    return max(StopPrefix(stop).push(text[max(0, len(text) - len(stop) + 1) :]) for stop in stops)


class StopPrefix:
    """Finds the longest end of a growing text that is a proper beginning of a stop string, in constant time
    per character (Knuth, Morris and Pratt, 1977)."""

    def __init__(self, stop: str):
        self._stop, self._length = stop, 0
        # Of the first n characters, the longest other end that begins the stop string; made as n grows.
        self._borders = array("i", [0, 0])

    def push(self, text: str) -> int:
        """Take more text; return the length of that end."""
        if not self._length and self._stop[0] not in text:
            return 0
        for letter in text:
            self._length = self._behind(self._length, letter)
            if self._length == len(self._borders):
                self._borders.append(self._behind(self._borders[-1], letter))
        return self._length if self._length < len(self._stop) else self._borders[-1]

    def _behind(self, length: int, letter: str) -> int:
        """Return the length of the end after a letter, from the one before it."""
        stop = self._stop
        while length and (length == len(stop) or stop[length] != letter):
            length = self._borders[length]
        return length + (stop[length] == letter)
