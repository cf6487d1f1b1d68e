"""The weights of an engine as a folder of which each device reads its part."""

import tempfile
from pathlib import Path

from duetto import LLM, EngineArgs, SamplingParams
from duetto.model_executor.model_loader import ShardedStateLoader
from duetto.utils.argparse_utils import FlexibleArgumentParser

PARAMS = SamplingParams(temperature=0.0, max_tokens=5)


def main():
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.add_argument("--pattern", help=f"{ShardedStateLoader.TP_ONLY_PATTERN!r}")
    args = parser.parse_args()
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(args))
    (wanted,) = llm.generate("def f(", PARAMS)
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "saved"
        saved.mkdir()
        llm.llm_engine.engine_core.save_sharded_state(path=saved, pattern=args.pattern, max_size=1 << 30)
        args.model, args.load_format = str(saved), "sharded_state"
        (found,) = LLM.from_engine_args(EngineArgs.from_cli_args(args)).generate("def f(", PARAMS)
        print("same:", found.outputs == wanted.outputs)
    args.model = "checkpoints/demo"
    try:
        LLM.from_engine_args(EngineArgs.from_cli_args(args))
    except ValueError as error:
        print("refused:", error)


if __name__ == "__main__":
    main()
