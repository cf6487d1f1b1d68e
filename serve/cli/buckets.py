"""`duetto buckets`: prefill lengths for a batch of prompts, by `planner/buckets.py`.

duetto buckets prompts.jsonl --programs 6      # edges for --prefill-buckets
"""

import argparse
from pathlib import Path

from ...checkpoints.hub import resolve_model
from ..engine.startup.model_folder import DEMO_FOLDER
from ..host.signals import restore_interrupt_handler
from ..options.checks import BUCKET_MULTIPLE_TOKENS, SMALLEST_CHUNK_TOKENS, round_up
from ..options.engine import EngineOptions
from ..options.flags import parse_positive
from ..planner.buckets import choose_edges, lone_chunk_lengths, padding_share, simulate_steps
from ..runtime.compiled.shapes import doublings

CONTRACT_EDGE_ROWS = 48  # rows; float32 products on CPUs have equal bits from this size on


def read_request_lengths(file: str, folder: Path) -> list[tuple[int, int]]:
    """Return the prompt and output tokens of each line of a batch. Raises ValueError for a line that is not
    allowed, and for a file that cannot be read."""
    from ..jobs.batch.prompts import read_prompt_lines
    from ..text.tokenizer.tokenizer import Tokenizer

    lines = read_prompt_lines(file, Tokenizer.from_folder(folder))
    return [(len(line.ids), line.max_tokens or 256) for line in lines]


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", help="JSON-lines file with requests, as for `duetto batch`")
    parser.add_argument(
        "--model",
        default=str(DEMO_FOLDER),
        help="folder or hub id of the tokenizer (default: the shipped model)",
    )
    parser.add_argument(
        "--programs", type=parse_positive, default=6, help="largest number of prefill programs (default: 6)"
    )
    parser.add_argument(
        "--smallest",
        type=parse_positive,
        default=CONTRACT_EDGE_ROWS,
        help=f"smallest edge in tokens (default: {CONTRACT_EDGE_ROWS}); use {BUCKET_MULTIPLE_TOKENS} for "
        "bfloat16 on CPUs with AMX",
    )
    parser.add_argument(
        "--max-prefill-tokens",
        type=parse_positive,
        default=512,
        help="prompt tokens of a step (default: 512)",
    )
    parser.add_argument(
        "--max-num-seqs", type=parse_positive, default=32, help="slots of the engine (default: 32)"
    )


def run(args: argparse.Namespace) -> int:
    """Print edges and their padding. Raises ValueError for an input without requests."""
    restore_interrupt_handler()
    sizes = {"max_prefill_tokens": args.max_prefill_tokens, "max_num_seqs": args.max_num_seqs}
    options = EngineOptions(**sizes, cpu_kernels=False)
    request_lengths = read_request_lengths(args.input, resolve_model(args.model, weights=False))
    if not request_lengths:
        raise ValueError(f"{args.input}: there is no request in it")
    steps = list(simulate_steps(request_lengths, options))
    last = round_up(args.max_prefill_tokens, SMALLEST_CHUNK_TOKENS)
    best = choose_edges(lone_chunk_lengths(steps), args.programs, last, args.smallest)
    for name, edges in {"powers of two": doublings(SMALLEST_CHUNK_TOKENS, last), "best": best}.items():
        flag = f"--prefill-buckets {','.join(map(str, edges))}"
        print(f"{name:<14}{padding_share(steps, edges):>7.1%} padding  {flag}")
    return 0
