"""Prompts of vLLM's benchmarks, for scripts that measure speculative decoding: `--dataset-name` is random,
custom or sharegpt."""

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ..refusals import require

OUTPUT_LEN = 256  # tokens, where a dataset states none


@dataclass(frozen=True)
class SampleRequest:
    """Request of a dataset; lengths are in tokens."""

    prompt: str
    prompt_len: int
    expected_output_len: int = OUTPUT_LEN
    multi_modal_data: None = None


def add_dataset_parser(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `get_samples` reads."""
    parser.add_argument("--dataset-name", choices=[*READERS], default="random")
    parser.add_argument("--dataset-path", help="file of custom (JSON lines with a prompt) or sharegpt")
    parser.add_argument("--num-prompts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--disable-shuffle", action="store_true")
    parser.add_argument(
        "--skip-chat-template", action="store_true", help="for custom: prompts are plain text"
    )
    parser.add_argument("--random-input-len", type=int, default=1024)
    parser.add_argument("--random-output-len", type=int, default=128)


def get_samples(args: argparse.Namespace, tokenizer: Any) -> list[SampleRequest]:
    """Return `num_prompts` requests, fewer if a file has fewer. Raises ValueError without a file."""
    draws = random.Random(args.seed)
    if args.dataset_name == "random":
        return [drawn(args, tokenizer, draws) for _ in range(args.num_prompts)]
    require(bool(args.dataset_path), f"--dataset-name {args.dataset_name} needs a file: set --dataset-path")
    found = list(READERS[args.dataset_name](Path(args.dataset_path), args, tokenizer))
    if not args.disable_shuffle:
        draws.shuffle(found)
    lengths = ((prompt, len(tokenizer.encode(prompt)), output) for prompt, output in found)
    return [SampleRequest(*one) for one in islice(lengths, args.num_prompts)]


def drawn(args: argparse.Namespace, tokenizer: Any, draws: random.Random) -> SampleRequest:
    ids = draws.choices(range(tokenizer.vocab_size), k=args.random_input_len)
    return SampleRequest(tokenizer.decode(ids), len(ids), args.random_output_len)


def custom(path: Path, args: argparse.Namespace, tokenizer: Any) -> Iterator[tuple[str, int]]:
    """Yield prompts of JSON lines, as one message each of the chat template unless it is skipped."""
    for line in filter(str.strip, path.read_text().splitlines()):
        given = json.loads(line)
        prompt = given["prompt"]
        if not args.skip_chat_template:
            messages = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        yield prompt, int(given.get("output_tokens") or OUTPUT_LEN)


def sharegpt(path: Path, args: argparse.Namespace, tokenizer: Any) -> Iterator[tuple[str, int]]:
    """Yield the first message of each conversation, and the length of its reply."""
    for talk in json.loads(path.read_text()):
        if len(turns := talk.get("conversations", talk.get("conversation", []))) >= 2:
            yield turns[0]["value"], len(tokenizer.encode(turns[1]["value"]))


READERS: dict[str, Any] = {"random": drawn, "custom": custom, "sharegpt": sharegpt}
