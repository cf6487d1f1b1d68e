"""Generate outputs constrained by a JSON Schema, a regular expression, a choice and a grammar.

`pip install 'duetto[structured]'`, then `python examples/structured_outputs.py [MODEL]`.
"""

import json
import sys

from duetto import LLM, SamplingParams
from duetto.sampling_params import StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z_]{3,12}$"},
        "kind": {"enum": ["function", "class"]},
        "arguments": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["name", "kind", "arguments"],
    "additionalProperties": False,
}
ASKED = {
    "json": StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    "regex": StructuredOutputsParams(regex=r"[0-9]{4}-[0-9]{2}-[0-9]{2}"),
    "choice": StructuredOutputsParams(choice=["list", "tuple", "dict"]),
    "grammar": StructuredOutputsParams(grammar='start: term ("+" term)*\nterm: /[0-9]{1,2}/ | "(" start ")"'),
}


def main() -> None:
    llm = LLM(*sys.argv[1:2], max_model_len=256, max_num_seqs=4)
    params = [SamplingParams(seed=1, max_tokens=128, structured_outputs=asked) for asked in ASKED.values()]
    outputs = llm.generate(["def read_lines(path):\n"] * len(params), params, use_tqdm=False)
    for name, output in zip(ASKED, outputs, strict=True):
        print(f"{name}: {output.outputs[0].text!r} ({output.outputs[0].finish_reason})")
    print("as an object:", json.loads(outputs[0].outputs[0].text)["kind"])
    llm.close()


if __name__ == "__main__":
    main()
