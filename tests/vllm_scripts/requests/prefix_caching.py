"""The same long prefix twice: the second prompt finds its pages, and the answers stay what they were."""

import gc

from duetto import LLM, SamplingParams
from duetto.distributed import cleanup_dist_env_and_memory

PREFIX = "# Functions about shapes.\n" + "def area(width, height):\n    return width * height\n\n" * 4
PROMPTS = [PREFIX + end for end in ("def circle(", "def square(")]
PARAMS = SamplingParams(temperature=0.0, max_tokens=8)
SIZES = {"max_model_len": 256, "max_num_seqs": 8, "block_size": 16, "max_num_batched_tokens": 64}


def main():
    regular = LLM(model="checkpoints/demo", enable_prefix_caching=False, **SIZES)
    expected = [o.outputs[0].text for o in regular.generate(PROMPTS, PARAMS)]
    del regular
    gc.collect()
    cleanup_dist_env_and_memory()

    cached = LLM(model="checkpoints/demo", enable_prefix_caching=True, **SIZES)
    cached.generate(PROMPTS[0], PARAMS)  # writes the prefix's pages
    outputs = cached.generate(PROMPTS, PARAMS)
    print("cached tokens:", [o.num_cached_tokens for o in outputs])
    print("same answers:", [o.outputs[0].text for o in outputs] == expected)
    print("forgotten:", cached.reset_prefix_cache())
    print("cached afterwards:", cached.generate(PROMPTS[1], PARAMS)[0].num_cached_tokens)


if __name__ == "__main__":
    main()
