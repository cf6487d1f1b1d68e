"""`duetto buckets`: prefill lengths for a batch of prompts, by `planner/buckets.py`.

duetto buckets prompts.jsonl --programs 6      # edges for --prefill-buckets
"""

import argparse
import sys
from pathlib import Path

from ...checkpoints.hub import resolve
from ..engine.startup.folder import DEMO
from ..host.signals import raise_on_interrupt
from ..options.checks import EDGE, SMALLEST_CHUNK, round_up
from ..options.engine import EngineOptions
from ..options.flags import positive
from ..planner.buckets import alone, best_edges, padding, rehearse
from ..runtime.compiled.shapes import doublings

CONTRACT_EDGE = 48  # rows from which on float32 products on CPUs have the bits of all larger ones


def lengths_of(file: str, folder: Path) -> list[tuple[int, int]]:
    """Prompt and output tokens of the lines of a batch. Raises ValueError for one that is not allowed,
    OSError."""
    from ..jobs.batch.job import BatchOptions
    from ..jobs.batch.lines import decode, task_of
    from ..jobs.batch.source import JobInput
    from ..text.openai.tasks import prompt_ids
    from ..text.tokenizer.tokenizer import Tokenizer

    limit = BatchOptions().max_line_bytes
    tokenizer = Tokenizer.from_folder(folder)
    found = []
    with JobInput.open(file, limit) as source:
        for line in source.lines():
            task = task_of(decode(line, limit), {}, seed=0)
            ids = prompt_ids(task, tokenizer, most=sys.maxsize)
            found.append((len(ids), task.params.max_tokens or 256))
    return found


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", help="JSON-lines file with requests, as for `duetto batch`")
    parser.add_argument(
        "--model", default=str(DEMO), help="folder or hub id of the tokenizer (default: the shipped model)"
    )
    parser.add_argument(
        "--programs", type=positive, default=6, help="largest number of prefill programs (default: 6)"
    )
    parser.add_argument(
        "--smallest",
        type=positive,
        default=CONTRACT_EDGE,
        help=f"smallest edge in tokens (default: {CONTRACT_EDGE}); use {EDGE} for bfloat16 on CPUs with AMX",
    )
    parser.add_argument(
        "--max-prefill-tokens", type=positive, default=512, help="prompt tokens of a step (default: 512)"
    )
    parser.add_argument("--max-num-seqs", type=positive, default=32, help="slots of the engine (default: 32)")


def run(args: argparse.Namespace) -> int:
    """Prints edges and their padding. Raises ValueError for an input without requests."""
    raise_on_interrupt()
    sizes = {"max_prefill_tokens": args.max_prefill_tokens, "max_num_seqs": args.max_num_seqs}
    options = EngineOptions(**sizes, cpu_kernels=False)
    work = lengths_of(args.input, resolve(args.model, weights=False))
    if not work:
        raise ValueError(f"{args.input}: there is no request in it")
    steps = list(rehearse(work, options))
    last = round_up(args.max_prefill_tokens, SMALLEST_CHUNK)
    best = best_edges(alone(steps), args.programs, last, args.smallest)
    for name, edges in {"powers of two": doublings(SMALLEST_CHUNK, last), "best": best}.items():
        flag = f"--prefill-buckets {','.join(map(str, edges))}"
        print(f"{name:<14}{padding(steps, edges):>7.1%} padding  {flag}")
    return 0
