"""Heads that ship, found by their folder alone, on prompts of a file."""

import json
import tempfile
from pathlib import Path

from duetto import LLM, SamplingParams
from duetto.benchmarks.datasets import add_dataset_parser, get_samples
from duetto.utils.argparse_utils import FlexibleArgumentParser

PROMPTS = ["def read(path):\n", "for line in file:\n", "class Stack:\n"]
SIZES = {"max_model_len": 256, "max_num_seqs": 8, "block_size": 16, "max_num_batched_tokens": 64}


def main(folder: str):
    file = Path(folder) / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    parser = FlexibleArgumentParser()
    add_dataset_parser(parser)
    words = "--dataset-name custom --skip-chat-template --disable-shuffle --num_prompts 2 --dataset-path"
    args = parser.parse_args([*words.split(), str(file)])
    llm = LLM(
        model="checkpoints/demo",
        speculative_config={"model": "demo-heads", "disable_padded_drafter_batch": False},
        **SIZES,
    )
    samples = get_samples(args, llm.get_tokenizer())
    print("prompts:", [sample.prompt for sample in samples] == PROMPTS[:2], samples[0].prompt_len)
    prompts = [{"prompt": s.prompt, "multi_modal_data": s.multi_modal_data} for s in samples]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    drafts = {metric.name: metric for metric in llm.get_metrics()}["vllm:spec_decode_num_drafts"]
    print("drafts:", drafts.value > 0, "tokens:", [len(o.outputs[0].token_ids) for o in outputs])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as own:
        main(own)
