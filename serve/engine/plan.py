"""What one step computes, and how much it may be."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..options.engine import most_tokens
from .request import Request


@dataclass(frozen=True, slots=True)
class Work:
    """A request's tokens [start, start + count) are computed in this step; the last of them may be guesses.

    ON_DEVICE among them stands for one that the device makes.
    """

    request: Request
    start: int
    count: int
    guesses: tuple[int, ...] = ()


Guess = Callable[[list[Work]], Sequence[Sequence[int]]]  # guesses for each row of decode


@dataclass
class StepPlan:
    """One step: requests to seat first, chunks of prompts, and rows of decode, or of verification if any has
    guesses."""

    seats: list[Request] = field(default_factory=list)
    prefill: list[Work] = field(default_factory=list)
    decode: list[Work] = field(default_factory=list)
    verify: list[Work] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.prefill or self.decode or self.verify)


class Limits(NamedTuple):
    """What the scheduler may hand out: seats, prompt tokens a step, of which a row that is begun costs `row`,
    decode steps of one dispatch, guesses of a row."""

    max_num_seqs: int
    max_prefill_tokens: int
    row: int
    decode_steps: int
    guesses: int = 0

    @property
    def most_tokens(self) -> int:
        """Tokens of one sequence that a step computes at most."""
        return most_tokens(self.max_prefill_tokens, self.decode_steps, self.guesses)
