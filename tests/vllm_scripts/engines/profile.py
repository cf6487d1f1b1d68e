"""A trace of what host and device do."""

import tempfile
from pathlib import Path

from duetto import LLM, SamplingParams
from duetto.config import ProfilerConfig


def main(folder: str):
    llm = LLM(
        model="checkpoints/demo", max_model_len=256, max_num_seqs=8, block_size=16, max_num_batched_tokens=64,
        tensor_parallel_size=1, profiler_config=ProfilerConfig(profiler="torch", torch_profiler_dir=folder),
    )  # fmt: skip
    llm.start_profile()
    outputs = llm.generate(["def f(", "import"], SamplingParams(temperature=0.8, top_p=0.95, max_tokens=4))
    llm.stop_profile()
    print([output.outputs[0].text for output in outputs])
    print("files:", any(path.is_file() for path in Path(folder).rglob("*")))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
