"""An engine from the command line, with the sampling parameters beside its own flags."""

from duetto import LLM, EngineArgs
from duetto.utils.argparse_utils import FlexibleArgumentParser


def create_parser() -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser(description="continue a prompt")
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="checkpoints/demo", max_num_seqs=8, block_size=16)
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int)
    group.add_argument("--temperature", type=float)
    return parser


def main(args: dict):
    max_tokens, temperature = args.pop("max_tokens"), args.pop("temperature")
    llm = LLM(**args)
    params = llm.get_default_sampling_params()
    if max_tokens is not None:
        params.max_tokens = max_tokens
    if temperature is not None:
        params.temperature = temperature
    for output in llm.generate(["def f(", "class A"], params):
        print(output.prompt, repr(output.outputs[0].text), len(output.outputs[0].token_ids))


if __name__ == "__main__":
    main(vars(create_parser().parse_args()))
