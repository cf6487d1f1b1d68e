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

from ..refusals import ensure

OUTPUT_LEN = 256  # tokens; default for datasets that state no length


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
    rng = random.Random(args.seed)
    if args.dataset_name == "random":
        return [random_sample(args, tokenizer, rng) for _ in range(args.num_prompts)]
    ensure(bool(args.dataset_path), f"--dataset-name {args.dataset_name} needs a file: set --dataset-path")
    prompts = list(READERS[args.dataset_name](Path(args.dataset_path), args, tokenizer))
    if not args.disable_shuffle:
        rng.shuffle(prompts)
    lengths = ((prompt, len(tokenizer.encode(prompt)), output) for prompt, output in prompts)
    return [SampleRequest(*request) for request in islice(lengths, args.num_prompts)]


def random_sample(args: argparse.Namespace, tokenizer: Any, rng: random.Random) -> SampleRequest:
    """Return a request with a prompt of random tokens."""
    ids = rng.choices(range(tokenizer.vocab_size), k=args.random_input_len)
    return SampleRequest(tokenizer.decode(ids), len(ids), args.random_output_len)


def read_custom(path: Path, args: argparse.Namespace, tokenizer: Any) -> Iterator[tuple[str, int]]:
    """Yield prompts of JSON lines, and output lengths in tokens.

    Each prompt is a user's message in the chat template, unless `skip_chat_template` is set.
    """
    for line in filter(str.strip, path.read_text().splitlines()):
        record = json.loads(line)
        prompt = record["prompt"]
        if not args.skip_chat_template:
            messages = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        yield prompt, int(record.get("output_tokens") or OUTPUT_LEN)


def read_sharegpt(path: Path, args: argparse.Namespace, tokenizer: Any) -> Iterator[tuple[str, int]]:
    """Yield the first message of each conversation, and the length of its reply in tokens."""
    for conversation in json.loads(path.read_text()):
        if len(messages := conversation.get("conversations", conversation.get("conversation", []))) >= 2:
            yield messages[0]["value"], len(tokenizer.encode(messages[1]["value"]))


READERS: dict[str, Any] = {"random": random_sample, "custom": read_custom, "sharegpt": read_sharegpt}
