"""Answer one prompt with a model, and with each of several of its LoRA adapters, in one batch.

python examples/adapters.py MODEL "List the customers of" sql=/adapters/sql de=/adapters/de
"""

import argparse

from duetto import LLM, SamplingParams
from duetto.lora.request import LoRARequest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("prompt")
    parser.add_argument("adapters", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--max-lora-rank", type=int, default=64)
    args = parser.parse_args()
    named = (text.partition("=") for text in args.adapters)
    adapters = [LoRARequest(name, i, folder) for i, (name, _, folder) in enumerate(named, 1)]
    greedy = SamplingParams(temperature=0, max_tokens=32)
    with LLM(args.model, enable_lora=True, max_loras=len(adapters), max_lora_rank=args.max_lora_rank) as llm:
        wanted = [None, *adapters]
        results = llm.generate([args.prompt] * len(wanted), greedy, lora_request=wanted)
    for own, result in zip(wanted, results, strict=True):
        print(f"--- {own.lora_name if own else 'the model'}\n{result.prompt}{result.outputs[0].text}")


if __name__ == "__main__":
    main()
