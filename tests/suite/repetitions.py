"""Which tests repeat for another case what a test of `make test` proves: they run with `--full` alone.

A row is a file and a regular expression that the rest of a test's name, or the case in its brackets, matches.
A test that found a fault which no other would find does not belong here.
"""

import re
from collections.abc import Mapping, Sequence

ROWS = {
    # each family with each layout; one model of each kind with the others
    "devices/test_split_families.py": r"(?!.*(qwen3_moe sparse-layout1|\[gpt2\]))",
    "devices/test_prefill_and_decode.py": r"test_(an_engine|pages)",
    "devices/test_three_stages.py": r"",
    "devices/test_two_by_two.py": r".*\[windows",
    "devices/test_stored_programs.py": r".*\[(data|halves)\]",
    "devices/test_shards.py": (
        r"test_(bits|samples|a_shard|several).*(?<!\[tiny-options0\])$|"
        r".*\[(latent|windows)|"
        r"test_(guesses|nothing_goes)"
    ),
    "devices/test_layouts.py": (
        r"test_a_folder|"
        r".*(one key head|\[latent)|"
        r"test_experts.*(int8|int4)|"
        r"test_served_tokens"
    ),
    "devices/test_stages.py": (
        r".*\[(windows, int8 cache|longrope|parallel|latent)\]|"
        r"test_(any_cut|the_shipped_model|guesses|a_tied_model)"
    ),
    "devices/test_two_devices.py": (
        r".*\[((recurrent|windows|latent)(, \w+ cache)?|0.9-LowRank|int4-Quantised)\]|"
        r"test_adapters|"
        r"test_a_sharded_training"
    ),
    "devices/test_deferred_draws.py": r".*\[layout0",
    "devices/test_logits_processors.py": r".*\[tensor\]",
    "devices/test_halves.py": r"test_requests_give_way",
    # each kind of guesser with each kind of pages
    "test_invariance_tiers.py": r"test_guesses|test_a_cache_that_was_saved|test_pages_of_other|.*\[(?!tiny)",
    "test_invariance.py": (
        r"test_(cold|prompt_logprobs).*\[(?!tiny)|"
        r"test_any_engine|"
        r"test_own_kernels.*\[(?!tiny)|"
        r"test_guesses.*-(?!tiny)|"
        r"test_more"
    ),
    "test_invariance_adapters.py": r"test_(preemption|batched|adapters_outlast)",
    # the kernels, whose bits other tests compare, under sanitizers
    "cpu_kernels/test_check.py": r"test_kernels_under",
    # each family there and back in another dtype, and cases of a family with the layers of another
    "checkpoints/test_families.py": (
        r"test_what_was_loaded.*-bfloat16\]|test_bfloat16_stays|"
        r"test_outputs.*\[\w+ (untied|tied|plain|biases|interval|full|listed|sparse|halves|alone|dense|lite)"
    ),
    "test_chaos.py": r"test_a_planted_fault_is_found\[(?!lost admission|realm)",
    "serve/cli/test_convert.py": (
        r"test_every_family_there_and_back\[(?!llama|gpt2|deepseek_v3)|test_quantised_weights.*\[(int8|fp8)"
    ),
    "serve/engine/core/test_engine_parity.py": r".*\[(?!deepseek_v3)",
    # each model, each scheme, each guesser where one shows the rest
    "serve/runtime/steps/test_scoring.py": (
        r"test_wanted.*\[(recurrent|latent|bfloat16|int8|parallel|windows.*|longrope|borrowed|demo)\]"
    ),
    "serve/runtime/steps/test_step.py": r"test_(verify|places).*|test_several_steps.*\[seeded\]",
    "serve/runtime/compiled/test_transfers.py": r".*\[(recurrent|windows|bfloat16)",
    "serve/runtime/equal_bits/test_warmup.py": (
        r".*\[(broken0|False|__init__)\]|"
        r"test_(it_ends_under|what_another|what_cannot|without_any|settings)"
    ),
    "serve/planner/roofline/test_targets.py": r"test_a_step_here.*(bfloat16)",
    "serve/engine/speculation/test_speculation.py": r"test_(guesses_of|a_model_that|the_controller_learns)",
    "serve/engine/speculation/test_rejection.py": (
        r".*\[(heads|tree of heads|wide tree of heads|tree of a draft model)\]"
    ),
    "serve/engine/speculation/test_speculation_controller.py": (
        r"test_never_below.*(draft model|slow host|\[processor,|\[processor with n-grams.*(batches|32 rows)|"
        r"\[accelerator, (1 rows|a ramp|batches)|\[processor of narrow calls, (a ramp|32 rows))"
    ),
    "serve/engine/core/test_quantised_serving.py": r".*\[(mxfp4|fp8 blocks)\]|test_pages_of_another",
    "model/test_quant.py": r"test_both_ways.*\[(2|1-int8)|.*\[(absorbed)\]",
    "model/test_expert_tiles.py": r"test_codes.*\[(?!int8-|MXFP4).*-float16|test_each_row.*\[float16-(32|64)",
    "model/test_experts.py": r"test_products_of_sorted.*\[c1",
    "model/test_nibbles.py": r"test_the_kernel_mult.*\[(groups of \d+|one scale a column|of all inputs)-True",
    "model/test_compress.py": r"test_what_compression_costs",
    "kvcache/test_kernels.py": (
        r"test_(keys_of_a_path|few_blocks).*(80|48|64-None-fp8)|"
        r"test_bits.*(80|112|int8)|"
        r"test_kernels_equal.*(96|112|192|int8|chunk, (bfloat16|e5m2)|latent, bfloat16|latent of 48|"
        r"\[chunk\]|\[chunk, latent\]|heads of 80\])"
    ),
    "kvcache/test_lanes.py": r"test_heads_that_fill.*48-auto|test_latent_rows.*\[(1-int8|32-auto)",
    "kvcache/test_quantised.py": r"test_(attention|latent_rows).*fp8_e4m3",
    "kvcache/test_groups.py": r"test_a_row.*\[bfloat16",
    "serve/text/grammar/test_ends.py": r".*\[choice0\]",
    "serve/text/grammar/test_constrained.py": r"test_guesses_and_preemption",
    "serve/llm/test_max_logprobs.py": r".*\[0.8\]",
    "serve/llm/tasks/test_beam_search.py": r".*\[four beams\]",
    "serve/cli/test_buckets.py": r"test_a_rehearsal.*\[128-3\]|test_buckets_change",
    "test_demo_model.py": r"test_most_lines.*def \]",
    "serve/runtime/compiled/test_traced.py": r"test_a_step.*\[recurrent\]",
    "serve/server/http/test_clients.py": r"test_streamed_and.*\[asked2\]",
    "serve/server/routes/test_resume.py": r"test_a_stream_goes.*\[penalty\]",
    "sampling/test_accept_draws.py": r"test_draws_end_to_end\[[13]|test_draws_among_several_guesses\[2",
    "sampling/test_row_independence.py": r"test_neighbours.*\[12\]",
    "sampling/test_sampling_kernels.py": r"test_kept_tokens.*\[50\]",
    "serve/runtime/compiled/test_executable_cache.py": r"test_(other_parameters|a_folder)",
    # kernels that an interpreter runs for long
    "model/test_fixed_interpreted.py": r"",
    "kvcache/test_hopper_attention.py": r"test_(?!where|a_group|.*behind others)",
    # kills, and examples that run for long
    "serve/runtime/multihost/test_two_processes.py": r"test_(a_batch_whose|rank_0|what_the_ranks)",
    "serve/jobs/batch/test_batch_kill.py": r".*\[(15-143|20)\]",
    "serve/text/grammar/test_flood.py": r"test_(a_flood|the_longest)",
    "serve/engine/startup/test_own_params.py": r"test_the_(training|example)",
    "test_notebooks.py": r"test_notebook_runs\[0[1234]|test_notebook_runs_with",
    "test_vllm_scripts.py": r".*\[(spec_decode_|quantization|logprobs|prefix_caching|neutral_options)",
    "test_benchmarks.py": r"test_prefixes",
    "test_gpu_benchmark.py": r"test_(every_part|a_part|the_script)",
    # pages beyond the first answer, which start engines as users do
    "test_docs_blocks.py": r"test_python_runs.*\[(docs/(?!quickstart)|README)",
    # each kind of layer beside the latent one; a model with states beside the tiny one
    "serve/engine/lora/test_layers.py": r"test_each_request.*\[(?!latent)",
    "test_invariance_processors.py": r".*recurrent\]|test_preemption.*\[chunks",
    # serving without kernels is what every other test does on a CPU
    "serve/engine/startup/test_refused_kernels.py": r"test_a_start_that_refuses",
    # each kernel in bfloat16 (those of states are in float32 always), and in one form of keys and of experts
    "serve/engine/startup/test_kernel_checks.py": (
        r"test_the_kernels_of.*\[(heads with|Mamba|delta rule).*float32|test_the_kernels_of.*\[heads-|"
        r"test_a_cache_in_8_bits.*fp8|"
        r"test_products_of_experts.*\[(None|int8)"
    ),
    # it compiles the library
    "serve/engine/startup/test_start_messages.py": r"test_kernels_of_a_cpu",
    # kernels of a CPU: each size, dtype and kind of keys
    "cpu_kernels/test_products.py": r".*\((1, 1|7, 5|640, 40|1025, 100|576, 576)\)|.*emulated",
    "cpu_kernels/test_norm.py": r".*\((576,|37,|1,)\)",
    "kvcache/test_cpu_attention.py": r".*\[(?!(token|chunk), window, cap, sinks-)",
    "model/test_packed.py": r".*bfloat16|.*\[int4",
    # the type checker takes a minute of its own
    "test_lint.py": r".*\[pyright\]",
}
# Models that differ in kind: float32, a cache in eight bits with windows, latent rows, states, bfloat16.
OF_EACH_KIND = ("tiny", "windows, int8 cache", "latent", "recurrent", "bfloat16")
PATTERNS = {file: re.compile(pattern) for file, pattern in ROWS.items()}


def unmatched(names: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the patterns that match no test, each with its file; `names` has the tests' names by file."""
    return [
        f"{file}: {part}"
        for file, pattern in ROWS.items()
        for part in (alternatives(pattern) if file in names else ())
        if not any(re.match(part, name) for name in names[file])
    ]


def alternatives(pattern: str) -> list[str]:
    """Return the parts of a regular expression between bars that stand in no parentheses."""
    parts, depth = [""], 0
    for token in re.findall(r"\\.|\[[^\]]*\]|.", pattern):
        depth += (token == "(") - (token == ")")
        if token == "|" and not depth:
            parts.append("")
        else:
            parts[-1] += token
    return parts


def is_repetition(file: str, name: str, model: str | None) -> bool:
    """Whether a test is one, by its file below `tests/`, its name with the case in brackets, and the model if
    it is a row of the invariance suite."""
    if model is not None and model not in OF_EACH_KIND:
        return True
    return file in PATTERNS and PATTERNS[file].match(name) is not None
