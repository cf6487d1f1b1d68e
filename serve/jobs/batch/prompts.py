"""Prompts of a batch's input as token ids, for commands that only read them."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from ...host.files import JobError
from ...text.openai.tasks import tokenize_prompt
from ...text.tokenizer.tokenizer import Tokenizer
from .job import BatchOptions
from .job_input import JobInput
from .lines import decode_line, read_line_task


@dataclass(frozen=True)
class PromptLine:
    """A line's prompt.

    number: number of the line in the file, from 1.
    ids: token ids of the prompt.
    max_tokens: largest number of tokens of the answer, or None if the line sets none.
    """

    number: int
    ids: list[int]
    max_tokens: int | None


def read_prompt_lines(file: str, tokenizer: Tokenizer | None) -> Iterator[PromptLine]:
    """Yield the prompts of a file of `duetto batch`; `-` is standard input.

    Raises ValueError, with the number of a line that is not allowed, and for a file that cannot be read.
    """
    limit = BatchOptions().max_line_bytes
    try:
        with JobInput.open(file, limit) as source:
            for line in source.read_lines():
                try:
                    task = read_line_task(decode_line(line, limit), {}, seed=0)
                    ids = tokenize_prompt(task, tokenizer, max_tokens=sys.maxsize)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{file}: line {line.number}: {error}") from error
                yield PromptLine(line.number, ids, task.params.max_tokens)
    except JobError as error:
        raise ValueError(str(error)) from error
