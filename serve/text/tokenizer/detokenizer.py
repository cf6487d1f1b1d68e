"""Incremental detokenization, and stop strings."""

from collections.abc import Iterable, Sequence

from .stop_strings import StopStrings
from .tokenizer import Tokenizer

NO_STOP_STRINGS = StopStrings(())


class Detokenizer:
    """Incremental detokenizer of a request's tokens, which also finds stop strings.

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
        stop_strings: StopStrings = NO_STOP_STRINGS,
        include_stop_str_in_output: bool = False,
        *,
        prompt_ids: Sequence[int] = (),
    ):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stop_strings = stop_strings
        self._state = StopStrings.ROOT  # of the final text
        self._include_stop_str = include_stop_str_in_output
        self._stream = tokenizer.make_stream(prompt_ids, skip_special_tokens)
        self._pieces: list[str] = []
        self._held = ""  # end of the final text that may begin a stop string
        self._length = 0  # of the final text, held part included
        self._floor = 0  # a stop string must end beyond this position
        self.stop_hit: str | None = None
        self.tokens_used = 0

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def text_after(self, num_pieces: int) -> tuple[str, int]:
        """Return the text after the first `num_pieces` pieces, and the number of pieces."""
        return "".join(self._pieces[num_pieces:]), len(self._pieces)

    def push(self, ids: Iterable[int], num_below_min: int = 0) -> str:
        """Add token ids, up to the one that completes a stop string; return the text that became final. The
        first `num_below_min` ids are among the request's first `min_tokens`: a stop string must end behind
        their text."""
        pieces = []
        for i, token_id in enumerate(ids):
            if self.stop_hit is not None:
                break
            self.tokens_used += 1
            token = self._tokenizer.token_to_decode(token_id, self._skip_special_tokens)
            new = "" if token is None else self._stream.push(token_id, token)
            pieces.append(self._add_text(new, i < num_below_min))
        return self._append_piece("".join(pieces))

    def finish(self) -> str:
        """End the text: return the held part. Nothing is left after a stop string."""
        if self.stop_hit is not None:
            return ""
        held = "" if self._include_stop_str else self._held
        self._held = ""
        return self._append_piece(held + self._stream.finish())

    def _append_piece(self, text: str) -> str:
        self._pieces.append(text)
        return text

    def _add_text(self, new: str, is_below_min: bool) -> str:
        """Add final text; return the part of it, and of the held text, that can be returned."""
        if not self._stop_strings:
            return new
        pending, before = self._stream.pending, self._length
        self._length += len(new)
        if is_below_min:
            self._floor = self._length + len(pending)
        state, end, length = self._stop_strings.find_stop(self._state, new, self._floor - before)
        if pending and not length:
            _, end, length = self._stop_strings.find_stop(state, pending, self._floor - self._length)
            end += len(new)
        num_returned = len(self._held) if self._include_stop_str else 0
        final = self._held + new
        if length:
            end += len(self._held)
            self.stop_hit = (final + pending)[end - length : end]
            return (final + pending)[num_returned : end if self._include_stop_str else end - length]
        self._state, kept = state, len(final) - self._stop_strings.held_length(state)
        self._held = final[kept:]
        return final[num_returned:] if self._include_stop_str else final[:kept]


def overlap_length(text: str, stop_strings: Sequence[str]) -> int:
    """Return the length of the longest end of the text that is a proper beginning of a stop string."""
    ends = range(min(len(text), max(map(len, stop_strings)) - 1), 0, -1)
    return next((n for n in ends if any(n < len(s) and text.endswith(s[:n]) for s in stop_strings)), 0)
