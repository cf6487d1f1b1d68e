"""The batch job: JSON lines in, JSON lines out, and no finished work is ever lost.

Lines are read as a stream, run through an engine with a bounded number in flight, and answered in the order of the input.
Into a file, answers go through a journal (see `journal`): the same command goes on where a killed one stopped.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import blake2b, sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ..sampling.params import SamplingParams
from .answers import Answers
from .chat import ChatTemplateError, apply_chat
from .interrupt import Interrupted, Interrupts
from .journal import Header, JobError, Journal, differing, disk, write_whole
from .jsonl import Address, LineError, RawLine, Task, address_of, decode, task_of
from .outputs import RequestOutput
from .source import Source, hash_of
from .text import Tokenizer

HELD = 4096  # answers that may wait in memory for an earlier one, where the output is a stream


class BatchEngine(Protocol):
    """What a job needs of an LLM."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...
    def add_request(
        self, prompt: list[int], params: SamplingParams, request_id: str, priority: int = 0
    ) -> object: ...
    def step(self) -> list[RequestOutput]: ...
    def report(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class BatchOptions:
    """How a job is run. `in_flight` lines are in the engine at once (about four times max_num_seqs keeps it busy).

    Lines without a seed get one from `seed` and their number; `sampling` holds parameters of lines that do not give them;
    `model_name` is the model's name in the answers; a line of more than `max_line_bytes` is answered with an error.
    """

    in_flight: int = 128
    seed: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    model_name: str = "duetto"
    max_line_bytes: int = 8 << 20
    progress: bool = True


def run_batch(
    llm_factory: Callable[[], BatchEngine],
    input: str,
    output: str,
    options: BatchOptions,
    fingerprint: Mapping[str, str],
    summary: Callable[[dict[str, Any]], None] | None = None,
) -> int:
    """Answers every line of `input` in `output`; `-` is standard input and output. Returns the process's exit code.

    The model is loaded by `llm_factory` when the first line needs it. `fingerprint` says what else decides the answers:
    model, device, versions, flags of the engine; a journal or an output with another one is refused. `summary` is given
    the engine's report at the end. 0 is success (lines that are wrong have answers that say so), 1 a refusal or failure that
    stderr explains, 130 and 143 an interrupted job that can be resumed.
    """
    try:
        SamplingParams.from_dict(options.sampling)
        with Interrupts() as interrupts, Source.open(input, options.max_line_bytes) as source:
            known = {"input": source.sha256, **own_fingerprint(options), **fingerprint}
            job = Job(llm_factory, source, options, interrupts, summary)
            return job.to_stdout() if output == "-" else job.to_file(Path(os.path.realpath(output)), known)
    except (JobError, TypeError, ValueError) as error:
        raise
    except Interrupted as interrupted:
        return interrupted.code
