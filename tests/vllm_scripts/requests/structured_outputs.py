"""Outputs under a schema, an expression, a choice and a grammar."""

import json

from duetto import LLM, SamplingParams
from duetto.sampling_params import StructuredOutputsParams

llm = LLM(
    model="checkpoints/demo", max_model_len=256, max_num_seqs=8, block_size=16, max_num_batched_tokens=64
)
SCHEMA = {"type": "object", "properties": {"age": {"enum": [30, 40]}}, "required": ["age"]}


def ask(**structured) -> str:
    sampling_params = SamplingParams(
        temperature=0.8, seed=3, max_tokens=100, structured_outputs=StructuredOutputsParams(**structured)
    )
    (output,) = llm.generate(prompts="A person: ", sampling_params=sampling_params, use_tqdm=False)
    return output.outputs[0].text


if __name__ == "__main__":
    print("choice:", ask(choice=["Positive", "Negative"]))
    print("regex:", ask(regex=r"[a-z]{3}@[a-z]{3}\.com"))
    print("json:", json.loads(ask(json=SCHEMA | {"additionalProperties": False})))
    print("grammar:", ask(grammar='start: "SELECT " ("a" | "b") " FROM t"'))
