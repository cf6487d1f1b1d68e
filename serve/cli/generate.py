"""`duetto generate`: continue one prompt and stream the text."""

import argparse
import sys
from dataclasses import replace

from ...sampling.params import SamplingParams
from ..engine.startup.model_folder import read_generation_defaults
from . import common

MAX_TOKENS = 256
UNSTREAMED_OPTIONS = ("n", "logprobs", "prompt_logprobs", "detokenize", "spaces_between_special_tokens")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help='text to continue; "-" reads standard input')
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument(
        "--chat", action="store_true", help="send the prompt as a user's message to a chat model"
    )
    forms.add_argument(
        "--token-ids",
        action="store_true",
        help="the prompt is token ids, separated by spaces or commas, for a model without a tokenizer; "
        "the answer is token ids too",
    )
    common.add_model_flags(parser)
    common.add_report_flags(parser)
    common.add_sampling_flags(
        parser,
        "in place of the model's own defaults",
        UNSTREAMED_OPTIONS,
        {"max_tokens": f"the model's own, else {MAX_TOKENS}"},
    )
    common.add_engine_flags(parser)
    common.add_cache_flags(parser)


def run(args: argparse.Namespace) -> int:
    common.check_output_files(args)
    common.sampling_params_from_args(args, SamplingParams())  # fails before a model is loaded
    folder, options = common.resolve_hub_ids(args, common.parse_engine_options(args))
    default_fields = options.default_sampling(read_generation_defaults(folder).sampling)
    common.exit_on_usage_error(args, lambda: SamplingParams.from_dict(default_fields))
    if sys.stdout is None or (args.prompt == "-" and sys.stdin is None):
        raise ValueError(f"standard {'output' if sys.stdout is None else 'input'} is closed")
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    ids = common.exit_on_usage_error(args, lambda: parse_token_ids(text)) if args.token_ids else None
    with common.start_llm(args, options) as llm:
        prompt = llm.chat_prompt([{"role": "user", "content": text}]) if args.chat else ids or text
        longest = default_fields.get("max_tokens", MAX_TOKENS)
        defaults = replace(llm.get_default_sampling_params(), max_tokens=longest)
        for piece in llm.stream(prompt, common.sampling_params_from_args(args, defaults)):
            print(*piece.token_ids if ids else [piece.text], end=" " if ids else "", flush=True)
        print(flush=True)
        if args.save_cache is not None:
            llm.save_cache(args.save_cache)
        common.show_and_save_report(llm.report(args.explain), args)
    return 0


def parse_token_ids(text: str) -> list[int]:
    """Return the token ids that a text lists. Raises ValueError for other text."""
    words = text.strip().strip("[]").replace(",", " ").split()
    if not words or not all(word.isdecimal() for word in words):
        raise ValueError("--token-ids: the prompt lists token ids, such as 5,17,3")
    return [int(word) for word in words]
