"""`duetto generate`: continue one prompt and stream the text."""

import argparse
import sys
from dataclasses import replace

from ...sampling.params import SamplingParams
from ..engine.startup.folder import checked_defaults
from . import common

MAX_TOKENS = 256
NOT_STREAMED = ("n", "logprobs", "prompt_logprobs", "detokenize", "spaces_between_special_tokens")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help='text to continue; "-" reads standard input')
    parser.add_argument(
        "--chat", action="store_true", help="send the prompt as a user's message to a chat model"
    )
    common.model_flags(parser)
    common.report_flags(parser)
    common.sampling_flags(
        parser,
        f"in place of the model's own defaults; max-tokens is {MAX_TOKENS} unless they set it",
        NOT_STREAMED,
    )
    common.engine_flags(parser)
    common.cache_flags(parser)


def run(args: argparse.Namespace) -> int:
    common.check_files(args)
    common.sampling_params(args, SamplingParams())  # fails before a model is loaded
    folder, options = common.resolve_once(args, common.engine_options(args))
    stated = options.recommended(checked_defaults(folder).sampling)
    common.checked(args, lambda: SamplingParams.from_dict(stated))
    if sys.stdout is None or (args.prompt == "-" and sys.stdin is None):
        raise ValueError(f"standard {'output' if sys.stdout is None else 'input'} is closed")
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    with common.start(args, options) as llm:
        prompt = llm.chat_prompt([{"role": "user", "content": text}]) if args.chat else text
        longest = stated.get("max_tokens", MAX_TOKENS)
        defaults = replace(llm.get_default_sampling_params(), max_tokens=longest)
        for piece in llm.stream(prompt, common.sampling_params(args, defaults)):
            print(piece.text, end="", flush=True)
        print(flush=True)
        if args.save_cache is not None:
            llm.save_cache(args.save_cache)
        common.finish(llm.report(args.explain), args)
    return 0
