"""`duetto bench`: measured times of decode, prefill and start on this machine, with their roofline floors.

A program is called back to back on a batch that is on the device; its time is the median over groups of
calls. The host gap is the share of an engine's step in which the program does not run: groups of program
calls and of steps are interleaved, and the gap is the median of their pairs. Host work is the median time of
an engine's steps on a device that takes no time. `--trace` draws one decode step of an engine.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ....checkpoints.huggingface import read_config
from ....model.config import ModelConfig
from ....model.transformer import Decoder
from ....model.tree import init_params
from ....model.weights.compression.compress import form_spec
from ....sampling.params import SamplingParams
from ...engine.startup.cpu_kernels import decide_cpu_kernels
from ...engine.startup.dtype import compute_dtype
from ...engine.startup.mesh import make_layout, param_shardings, shard_params
from ...engine.startup.model_folder import convert_to_engine_layout, read_model
from ...engine.startup.model_source import ModelSource
from ...host.devices import default_device, time_calls
from ...host.process import keep_freed_memory, use_huge_pages
from ...host.signals import restore_interrupt_handler
from ...llm.llm import LLM
from ...options.engine import EngineOptions
from ...options.flags import parse_positive, parse_positives
from ...planner.roofline.floor import program_demand
from ...planner.roofline.presets import PRESETS
from ...planner.roofline.program_times import fill_slots, full_batch
from ...planner.roofline.targets import Peaks, local_target
from ...runtime.compiled.jaxcache import enable_compilation_cache
from ...runtime.compiled.local_executor import LocalExecutor
from ...runtime.compiled.lowering import LocalLowering
from ...runtime.compiled.program_table import ProgramTable
from ...runtime.compiled.shapes import Shape, Sizes
from ...runtime.steps.phases import TargetOnly
from ...text.tokenizer.tokenizer import Tokenizer
from ..common import add_engine_flags, add_model_flags, parse_engine_options
from . import host_work
from .timeline import record_timeline, render_timeline

TIMED_GROUPS = 5
HOST_ROWS = (32, 256)


@dataclass(frozen=True)
class BenchModel:
    """A model to measure: its parameters in memory, and the engine's options."""

    name: str
    config: ModelConfig
    params: Decoder
    options: EngineOptions

    @property
    def dtype(self) -> Any:
        return self.params.embed.dtype


@dataclass(frozen=True)
class Figure:
    """A measured program.

    part: key of MEASURES. what: the program. context: tokens in the cache. seconds: median of a call. floor:
    roofline minimum, seconds. host_gap: share of an engine's step in which the program does not run.
    """

    part: str
    what: str
    context: int
    seconds: float
    tokens_per_second: float
    floor: float | None = None
    host_gap: float | None = None


def load_bench_model(args: argparse.Namespace, options: EngineOptions) -> BenchModel:
    """Load a folder, or draw a preset's parameters. Raises ValueError for a pipeline, and for shards."""
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        if getattr(options, name) > 1:
            raise ValueError(
                f"{name} {getattr(options, name)} is not allowed: bench runs one program on its own rows"
            )
    device = default_device()
    if not args.shape:
        origin = ModelSource.resolve_names(args.model, revision=args.revision, download_dir=args.download_dir)
        options = origin.resolve_options(options, download_dir=args.download_dir)
        config = read_config(origin.model_folder)
        options = decide_cpu_kernels(options, device, config, args.dtype)
        dtype = compute_dtype(args.dtype, device, config, origin.model_folder, options.cpu_kernels)
        where = param_shardings(config, make_layout(options)) or device
        config, params = read_model(origin.model_folder, dtype, where, options.quantization)
        return BenchModel(args.model or "demo", config, convert_to_engine_layout(params, options), options)
    options.refuse_checkpoint_quantization("a shape has no checkpoint")
    config = PRESETS[args.shape]
    options = decide_cpu_kernels(options, device, config, args.dtype)
    dtype = compute_dtype(args.dtype, device, config, None, options.cpu_kernels)
    param_dtype = jnp.dtype("bfloat16" if dtype == "auto" else dtype)
    specs = form_spec(config, options.quantization)
    params = shard_params(config, init_params(jax.random.key(0), specs, param_dtype), make_layout(options))
    return BenchModel(args.shape, config, convert_to_engine_layout(params, options), options)


def group_seconds(call: Callable[[], Any], repeats: int) -> float:
    """Return the seconds of a call among `repeats` back to back; only the last one is waited for."""

    def group() -> Any:
        for _ in range(repeats - 1):
            call()
        return call()

    return time_calls(group, 1)[0] / repeats


def median_seconds(call: Callable[[], Any], repeats: int) -> float:
    """Return the median of TIMED_GROUPS groups of calls, after one call to warm up."""
    jax.block_until_ready(call())
    return statistics.median(group_seconds(call, repeats) for _ in range(TIMED_GROUPS))


# ---------------------------------------------------------------- single programs


class Bench:
    """A compiled program, with a state and a batch to call it on repeatedly."""

    def __init__(self, model: BenchModel, shape: Shape, context: int):
        W, rows = model.options.page_size, shape.num_sequences
        longest = context + shape.area // rows
        pages = rows * -(-longest // W)
        counts, cache_dtype = (pages,) * len(model.config.windows), model.options.kv_cache_dtype
        sizes = Sizes(max(longest, 2), rows, counts, W, kv_cache_dtype=cache_dtype)
        lowering = LocalLowering.from_params(TargetOnly(model.config), model.params, sizes)
        programs = ProgramTable(lowering, [shape], reproducible=model.options.reproducible)
        self.executor = LocalExecutor(programs)
        self.shape, self.model = shape, model
        self.state = fill_slots(self.executor.fresh_arguments(model.params))
        batch = full_batch(sizes, shape, context)
        batch.tokens[:] = np.arange(shape.area).reshape(batch.tokens.shape) % model.config.vocab_size
        self.batch = jax.device_put(batch, self.state.replicated_sharding)

    def step(self) -> Any:
        cache, slots, output = self.executor.run(self.shape, self.state, self.batch)
        self.state = replace(self.state, cache=cache, slots=slots)
        return output


def measure_shape(model: BenchModel, shape: Shape, context: int, repeats: int, peaks: Peaks) -> Figure:
    """Measure one program; each of its rows has `context` tokens in the cache."""
    seconds = median_seconds(Bench(model, shape, context).step, repeats)
    cache_dtype = model.options.kv_cache_dtype
    floor_demand = program_demand(shape, model.config, model.dtype, context, model.params, cache_dtype)
    floor = floor_demand.floor_seconds(peaks.flops(model.dtype), peaks.bandwidth)
    return Figure(shape.phase, str(shape), context, seconds, shape.area / seconds, floor)


# ---------------------------------------------------------------- the parts


def bench_decode(model: BenchModel, args: argparse.Namespace, peaks: Peaks) -> Iterator[Figure]:
    """Measure decode steps of one token for each width and context, and the host gap at the first context."""
    for width in args.widths:
        for i, context in enumerate(args.contexts):
            figure = measure_shape(model, Shape("decode", width, 1), context, args.repeats, peaks)
            gap = measure_host_gap(model, width, context, args.repeats) if args.host_gap and not i else None
            yield replace(figure, host_gap=gap)


def measure_host_gap(model: BenchModel, width: int, context: int, repeats: int) -> float:
    """Return the share of an engine's step in which the program does not run: `width` requests decode from
    `context` tokens on.

    If the context is a multiple of attention's block, both read the same number of blocks.
    """
    program = Bench(model, Shape("decode", width, 1), context)
    jax.block_until_ready(program.step())
    with start_decoding_engine(model, width, context, repeats) as llm:

        def step() -> Any:
            llm.step()
            return llm.engine.cache  # ready when the step in flight ends

        jax.block_until_ready(step())
        pairs = [
            (group_seconds(program.step, repeats), group_seconds(step, repeats)) for _ in range(TIMED_GROUPS)
        ]
    return statistics.median(1 - alone / served for alone, served in pairs)


@contextmanager
def start_decoding_engine(
    model: BenchModel, width: int, context: int, repeats: int, tokenizer: Tokenizer | None = None
) -> Iterator[LLM]:
    """Start an engine whose requests are prefilled and decode for as long as a measurement takes; with a
    tokenizer they make text."""
    chunks = width * -(-context // model.options.prefill_tokens)
    length = context + chunks + TIMED_GROUPS * repeats + 8
    options = replace(
        model.options, max_num_seqs=width, max_model_len=length, decode_steps=1, reproducible=False,
        background_compilation=False,
    )  # fmt: skip
    params = SamplingParams(
        temperature=0.0, max_tokens=length - context, ignore_eos=True, detokenize=tokenizer is not None
    )
    with LLM.from_params(
        model.config, model.params, tokenizer, compilation_cache=None, **asdict(options)
    ) as llm:
        for row in range(width):
            llm.add_request([(row + i) % model.config.vocab_size for i in range(context)], params)
        num_prefills = -1
        while num_prefills < count_prefills(llm):  # until a step dispatches no prefill
            num_prefills = count_prefills(llm)
            llm.step()
        yield llm


def count_prefills(llm: LLM) -> int:
    """Return the number of prefill programs dispatched so far."""
    return sum(n for name, n in llm.report()["steps"].items() if name.startswith("prefill"))


def bench_prefill(model: BenchModel, args: argparse.Namespace, peaks: Peaks) -> Iterator[Figure]:
    """Measure a prefill of one prompt, for each length."""
    for length in args.lengths:
        yield measure_shape(model, Shape("prefill", 1, length), 0, args.repeats, peaks)


def bench_startup(model: BenchModel, args: argparse.Namespace, peaks: Peaks) -> Iterator[Figure]:
    """Measure a start, from parameters in memory to the first token and to a warm engine: first with an empty
    folder of compiled programs, then with the folder that the first start filled."""
    with tempfile.TemporaryDirectory() as folder:
        enable_compilation_cache(folder)
        for what in ("cold", "warm"):
            jax.clear_caches()
            begin = time.perf_counter()
            with LLM.from_params(
                model.config, model.params, compilation_cache=None, **asdict(model.options)
            ) as llm:
                llm.generate([[1]], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
                first = time.perf_counter() - begin
                while llm.engine.warmup is not None:
                    time.sleep(0.05)
                seconds, programs = time.perf_counter() - begin, llm.report()["programs"]
            yield Figure("startup", f"{what}, first token", 0, first, 0.0)
            yield Figure("startup", f"{what}, {programs} programs", 0, seconds, 0.0)
        jax.config.update("jax_compilation_cache_dir", None)


def bench_host(model: BenchModel, args: argparse.Namespace, peaks: Peaks) -> Iterator[Figure]:
    """Measure the host's work for a step, with detokenization if the model has a tokenizer."""
    tokenizer = load_bench_tokenizer(args)
    for rows in HOST_ROWS:
        seconds = host_work.measure_host_step(model.config, model.params, tokenizer, model.options, rows)
        yield Figure("host", f"host work, {rows} rows", host_work.PROMPT_TOKENS, seconds, rows / seconds)


def load_bench_tokenizer(args: argparse.Namespace) -> Tokenizer | None:
    """Load the tokenizer of the model's folder; None for a shape."""
    if args.shape:
        return None
    source = ModelSource.resolve_names(args.model, revision=args.revision, download_dir=args.download_dir)
    return source.load_tokenizer()[0]


MEASURES = {"decode": bench_decode, "prefill": bench_prefill, "host": bench_host, "startup": bench_startup}


def trace_decode_step(model: BenchModel, args: argparse.Namespace) -> None:
    """Draw a warm decode step of the first width and context into the file `args.trace`."""
    width, context = args.widths[0], args.contexts[0]
    tokenizer = load_bench_tokenizer(args)
    with start_decoding_engine(model, width, context, args.repeats, tokenizer) as llm:
        timeline = record_timeline(llm, args.repeats)
    title = f"{model.name} in {model.dtype}, decode[{width},1] at {context} tokens"
    Path(args.trace).write_text(render_timeline(timeline, title))
    print(f"{args.trace}: {title}: {timeline.seconds * 1e3:.2f} ms")


# ---------------------------------------------------------------- the command


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    group = parser.add_argument_group("what to measure")
    group.add_argument(
        "--parts",
        nargs="+",
        choices=MEASURES,
        help="parts to measure (default: all, with --trace none)",
    )
    group.add_argument(
        "--shape",
        choices=sorted(PRESETS),
        help="random weights in the sizes of a known model, instead of --model",
    )
    group.add_argument(
        "--widths", type=parse_positives, default=(1, 8, 32), help="rows of a decode step (default: 1,8,32)"
    )
    group.add_argument(
        "--contexts",
        type=parse_positives,
        default=(128, 512),
        help="tokens of each row in the cache (default: 128,512)",
    )
    group.add_argument(
        "--lengths",
        type=parse_positives,
        default=(64, 128, 256, 512),
        help="tokens of a prompt (default: 64,128,256,512)",
    )
    group.add_argument(
        "--repeats",
        type=parse_positive,
        default=16,
        help="calls of a group; five groups are timed (default: 16)",
    )
    group.add_argument(
        "--host-gap",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also measure the engine's host gap, at the first context",
    )
    group.add_argument("--json", metavar="FILE", help="also write the figures as JSON")
    group.add_argument(
        "--trace",
        metavar="FILE",
        help="draw one decode step of the first width and context, host and device, as an SVG",
    )
    add_engine_flags(parser, is_alone=True)


def run(args: argparse.Namespace) -> int:
    """Draw a step, and print each figure when it is measured. Raises ValueError for a model that cannot be
    loaded."""
    restore_interrupt_handler()
    options = parse_engine_options(args)
    if default_device().platform == "cpu":
        keep_freed_memory()  # as an engine does; else each call would fault in its temporaries
    model = load_bench_model(args, options)
    use_huge_pages(model.params)
    if args.trace:
        trace_decode_step(model, args)
    if parts := args.parts or ([] if args.trace else list(MEASURES)):
        measure_parts(model, args, parts)
    return 0


def measure_parts(model: BenchModel, args: argparse.Namespace, parts: Sequence[str]) -> None:
    """Measure parts, keys of MEASURES, and print their figures; `args.json` is a file for them, if any."""
    target = local_target(measure=True)
    figures = []
    peaks = target.peaks
    assert peaks is not None
    processor = platform.processor() or platform.machine()
    about = f"{model.name} in {model.dtype} on {target.name} ({processor}), jax {jax.__version__}"
    rates = f"{peaks.flops(model.dtype) / 1e9:.0f} GFLOP/s and {peaks.bandwidth / 1e9:.1f} GB/s, measured"
    print(f"{about}\n{rates}")
    print(f"{'program':<22}{'context':>8}{'ms':>10}{'tokens/s':>10}{'floor ms':>10}{'host gap':>10}")
    for part in parts:
        for figure in MEASURES[part](model, args, peaks):
            figures.append(figure)
            print(render_figure(figure), flush=True)
    if args.json:
        records = [asdict(figure) for figure in figures]
        Path(args.json).write_text(
            json.dumps({"about": about, "peaks": asdict(peaks), "rows": records}, indent=2) + "\n"
        )


def render_figure(figure: Figure) -> str:
    floor = "-" if figure.floor is None else f"{figure.floor * 1e3:.2f}"
    gap = "-" if figure.host_gap is None else f"{figure.host_gap:.1%}"
    numbers_text = f"{figure.seconds * 1e3:>10.2f}{figure.tokens_per_second:>10.1f}"
    return f"{figure.what:<22}{figure.context:>8}{numbers_text}{floor:>10}{gap:>10}"
