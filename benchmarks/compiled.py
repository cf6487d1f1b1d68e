"""What XLA makes of whole models for devices that need not be here, as a Markdown table of one device's
figures: `python -m benchmarks.compiled --target h200`.

A model's layers repeat, so two programs of few layers are compiled and the rest follows: what one more period
of layers adds. Times are estimates (bytes at the vendor's peak bandwidth), never measurements.
"""

import argparse
from dataclasses import dataclass, replace

from duetto.model.config import Dense, Experts, GroupedQuery, Latent, LayerKind, ModelConfig, NormKind
from duetto.model.draft_pair import target_params
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.engine_plan import EnginePlan, abstract_arguments, analyze_shape_cost
from duetto.serve.planner.roofline.floor import program_demand
from duetto.serve.planner.roofline.presets import PRESETS
from duetto.serve.planner.roofline.targets import Target, find_target
from duetto.serve.runtime.compiled.shapes import Shape, Sizes

LITE = Latent(16, 512, 128, 64, 128)
MODELS = {
    "8B dense": (PRESETS["8b"], 0, 1),
    "Qwen3-0.6B": (PRESETS["0.6b"], 0, 1),
    "Mistral-Small-24B": (ModelConfig.uniform(131072, 5120, 32768, 40, 32, 8, 128, 32768), 0, 1),
    "Qwen3-32B": (
        ModelConfig(
            151936,
            5120,
            64 * (LayerKind(GroupedQuery(64, 8, 128, qk_norm=NormKind(eps=1e-6)), Dense(25600)),),
            40960,
        ),
        0,
        1,
    ),
    "Qwen3-30B-A3B": (PRESETS["30b-a3b"], 0, 1),
    "Qwen3.5-4B": (PRESETS["qwen3.5-4b"], 0, 4),
    "Qwen3-Next-80B-A3B": (PRESETS["qwen3-next-80b"], 0, 4),
    "gpt-oss-20b in bfloat16": (PRESETS["gpt-oss-20b"], 0, 2),
    "DeepSeek-V2-Lite": (
        ModelConfig(
            102400,
            2048,
            (LayerKind(LITE, Dense(10944)), *26 * (LayerKind(LITE, Experts(64, 6, 1408, shared=2816)),)),
            16384,
        ),
        1,
        1,
    ),
}  # each with the layers before those that repeat, and the layers of a period


@dataclass(frozen=True)
class Found:
    """A program's bytes, kernels and waits for the host."""

    touched: float
    kernels: float
    buffers: int
    read_backs: int


@dataclass(frozen=True)
class Where:
    """Devices, and how a model is spread over them."""

    target: Target
    options: EngineOptions

    @property
    def of_shard(self) -> int:
        """Devices that share a step's rows."""
        return len(self.target.devices) // self.options.data_parallel_size


def plan_of(config: ModelConfig, where: Where, rows: int, context: int) -> EnginePlan:
    # one more page: a pool is told from a weight by its bytes
    pages = tuple(max(2 * rows * context // 64, 64) + 1 for _ in config.windows)
    sizes = Sizes(4 * context, rows, pages, 64, shards=where.options.data_parallel_size)
    return EnginePlan("", config, "bfloat16", where.options, where.target, sizes, context)


def compiled(config: ModelConfig, where: Where, shape: Shape, context: int) -> Found:
    plan = plan_of(config, where, shape.rows, context)
    facts = analyze_shape_cost(plan, abstract_arguments(plan), shape).facts
    assert facts is not None and facts.thunks is not None, "only GPUs' programs have thunks"
    return Found(facts.bytes, facts.thunks.kernels, facts.thunks.buffers, facts.thunks.read_backs)


def row(name: str, where: Where, shape: Shape, context: int) -> str:
    """A line of the table: a model's decode, its periods counted out from two small programs."""
    target, shards = where.target, where.options.data_parallel_size
    config, first, period = MODELS[name]
    small = [
        compiled(replace(config, layers=config.layers[: first + n * period]), where, shape, context)
        for n in (1, 2)
    ]
    more = (len(config.layers) - first) / period - 1
    touched = small[0].touched + more * (small[1].touched - small[0].touched)
    kernels = (small[1].kernels - small[0].kernels) / period
    whole = plan_of(config, where, shape.rows, context)
    params = target_params(abstract_arguments(whole).params)
    least = program_demand(shape, config, "bfloat16", context, params, shards=shards).bytes / where.of_shard
    assert target.peaks is not None
    times = (x / target.peaks.bandwidth * 1e3 for x in (least, touched))
    cells = (
        f"{kernels:.0f}", f"{max(s.buffers for s in small)}", f"{max(s.read_backs for s in small)}",
        f"{least / 1e9:.2f}", f"{touched / 1e9:.2f}", f"{touched / least:.2f}", *(f"{t:.1f}" for t in times),
    )  # fmt: skip
    return f"| {name} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="h200")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--data-parallel-size", type=int, default=1)
    parser.add_argument("--enable-expert-parallel", action="store_true")
    args = parser.parse_args()
    options = EngineOptions(
        data_parallel_size=args.data_parallel_size, enable_expert_parallel=args.enable_expert_parallel
    )
    where = Where(find_target(args.target), options)
    heads = (
        f"decode[{args.rows},1]", "kernels a layer", "command buffers", "read-backs", "least, GB",
        "touched, GB", "ratio", "floor, ms", "touched at peak, ms (est.)",
    )  # fmt: skip
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for name in args.models:
        print(row(name, where, Shape("decode", args.rows, 1), args.context), flush=True)


if __name__ == "__main__":
    main()
