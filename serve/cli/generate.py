"""`duetto generate`: one prompt continued, shown as it comes."""

import argparse
import sys
from dataclasses import replace

from ...sampling.params import SamplingParams
from ..engine.startup.folder import checked_defaults
from .common import (
    cache_flags,
    check_cache,
    check_report,
    checked,
    engine_flags,
    engine_options,
    finish,
    model_flags,
    report_flags,
    resolve_once,
    sampling_flags,
    sampling_params,
    start,
)

MAX_TOKENS = 256
NOT_STREAMED = ("n", "logprobs", "prompt_logprobs", "detokenize", "spaces_between_special_tokens")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help='the text to continue; "-" reads standard input')
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message to a chat model")
    model_flags(parser)
    report_flags(parser)
    sampling_flags(
        parser,
        f"beside the model's own defaults; max-tokens is {MAX_TOKENS} where they say nothing",
        NOT_STREAMED,
    )
    engine_flags(parser)
    cache_flags(parser)


def run(args: argparse.Namespace) -> int:
    check_report(args)
    check_cache(args)
    sampling_params(args, SamplingParams())  # what is wrong is said before a model is loaded
    folder, options = resolve_once(args, engine_options(args))
    stated = options.recommended(checked_defaults(folder).sampling)
    checked(args, lambda: SamplingParams.from_dict(stated))
    if sys.stdout is None or (args.prompt == "-" and sys.stdin is None):
        raise ValueError(f"standard {'output' if sys.stdout is None else 'input'} is closed")
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    with start(args, options) as llm:
        prompt = llm.chat_prompt([{"role": "user", "content": text}]) if args.chat else text
        longest = stated.get("max_tokens", MAX_TOKENS)
        defaults = replace(llm.get_default_sampling_params(), max_tokens=longest)
        for piece in llm.stream(prompt, sampling_params(args, defaults)):
            print(piece.text, end="", flush=True)
        print(flush=True)
        if args.save_cache is not None:
            llm.save_cache(args.save_cache)
        finish(llm.report(args.explain), args)
    return 0
