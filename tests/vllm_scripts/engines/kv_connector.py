"""One engine stores the pages of its prompts in a folder, the next one finds them."""

import tempfile

from duetto import LLM, SamplingParams
from duetto.config import KVTransferConfig

PROMPTS = ["count = 0\n" * 20 + "print(", "total = 0\n" * 20 + "return "]
PARAMS = SamplingParams(temperature=0.0, max_tokens=5)
SIZES = {"max_model_len": 256, "max_num_seqs": 8, "block_size": 16, "max_num_batched_tokens": 64}


def run(folder: str) -> list:
    config = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": folder},
    )
    with LLM(model="checkpoints/demo", kv_transfer_config=config, **SIZES) as llm:
        return llm.generate(PROMPTS, PARAMS)


def main():
    with tempfile.TemporaryDirectory() as folder:
        first, second = run(folder), run(folder)
    print("computed:", [output.num_cached_tokens for output in first])
    print("found:", all(output.num_cached_tokens > 32 for output in second))
    print("same:", [o.outputs for o in first] == [o.outputs for o in second])


if __name__ == "__main__":
    main()
