"""Which tests repeat for another case what a test of `make test` proves: they run with `--full` alone.

A row is a file and a regular expression that the rest of a test's name, or the case in its brackets, matches.
A test that found a fault which no other would find does not belong here.
"""

import re

ROWS = {
    # each family with each layout; one model of each kind with the others
    "devices/test_split_families.py": r"(?!.*(qwen3_moe sparse-layout1|\[gpt2\]))",
    "devices/test_prefill_and_decode.py": r"test_(an_engine|pages)",
    "devices/test_three_stages.py": r"",
    "devices/test_shards.py": r"test_(bits|samples|a_shard|several).*(?<!\[tiny-options0\])$|.*\[latent",
    "devices/test_layouts.py": r"test_a_folder|.*(one key head|\[latent)|test_experts.*(int8|int4)",
    "devices/test_stages.py": r".*\[(windows, int8 cache|longrope|parallel|latent)\]|test_any_cut",
    "devices/test_two_devices.py": r".*\[(recurrent|windows|latent)(, \w+ cache)?\]",
    # each kind of guesser with each kind of pages
    "test_invariance_tiers.py": r"test_guesses_of_the_device(?!.*\[tiny-a model that)|test_pages_of_other",
    "test_invariance.py": r"test_(guesses|cold|any_engine).*\[.*(latent|bfloat16)",
    # each family there and back, and in another dtype: its outputs beside Transformers' are in both
    "checkpoints/test_families.py": r"test_what_was_loaded.*-bfloat16\]|test_bfloat16_stays",
    "serve/commands/test_convert.py": r"test_every_family_there_and_back\[(?!llama|gpt2|deepseek_v3)",
}
# Models that differ in kind: float32, a cache in eight bits with windows, latent rows, states, bfloat16.
OF_EACH_KIND = ("tiny", "windows, int8 cache", "latent", "recurrent", "bfloat16")
PATTERNS = {file: re.compile(pattern) for file, pattern in ROWS.items()}


def is_repetition(file: str, name: str, model: str | None) -> bool:
    """Whether a test is one, by its file below `tests/`, its name with the case in brackets, and the model if
    it is a row of the invariance suite."""
    if model is not None and model not in OF_EACH_KIND:
        return True
    return file in PATTERNS and PATTERNS[file].match(name) is not None
