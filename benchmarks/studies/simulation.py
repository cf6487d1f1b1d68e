"""The simulation held against the real engine: the Azure trace on this machine at some loads.

    python benchmarks/studies/simulation.py --requests 80 --rounds 2 --json FILE
    XLA_FLAGS=--xla_cpu_multi_thread_eigen=false python benchmarks/studies/simulation.py --processor-time

For each load the shipped model serves requests of the trace, scaled down, at the trace's own moments; how
long each of its calls took is noted (each is waited for: a CPU runs it at once anyway), and what the host
needed beside, for a step, for each of its rows and for each request that took its seat. Then the same
requests are served in simulated time, with these times in two ways: as a line over the tokens in the cache
for each shape with the spread around it, which is what a plan knows; and by the moment, each call as long as
the one of its shape that was on its way then, since other work makes a machine slow for a
while. Loads take turns, in rounds; a load is a share of what the engine gives where all requests are there at
once. Printed is how far each simulation is off. With --processor-time the engine's clock is the process's own
time on a processor, so that what others do there is left out: what a quiet core would show.
"""

import argparse
import json
import math
import os
import platform
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.measured_times import MeasuredTimes
from benchmarks.traces import AZURE, Scale, TraceEntry, read
from duetto import LLM
from duetto.kvcache.pages import Batch
from duetto.model.draft_pair import target_params
from duetto.serve.engine.core.engine import Engine
from duetto.serve.engine.core.request import Request, RequestTimes
from duetto.serve.planner.simulation.engine_simulation import GREEDY_PARAMS, Simulation
from duetto.serve.planner.simulation.fleet import Fleet
from duetto.serve.planner.simulation.step_times import HostTimes, StepCall
from duetto.serve.planner.workloads.traces import speed_up
from duetto.serve.runtime.compiled.shapes import Shape

SEATS, LONGEST = 8, 512
SCALE = Scale(8, 256, 64)
LOADS = 0.3, 0.6, 0.8, 0.95
BOUNDS = {"ttft_p50": 0.1, "tpot_p50": 0.1, "ttft_p99": 0.2, "tpot_p99": 0.2, "tokens_per_second": 0.05}


class Sample(NamedTuple):
    """A call: when its results arrived, and what it was."""

    at: float
    shape: Shape
    cached: int
    seconds: float


class Step(NamedTuple):
    """What the host needed for a step beside its calls, the requests in it, and those that took a seat."""

    seconds: float
    rows: int
    seated: int


class Wall:
    """The time, and waiting until a moment."""

    def __call__(self) -> float:
        return time.monotonic()

    def wait_until(self, moment: float) -> None:
        time.sleep(max(moment - self(), 0))


class Processor:
    """Seconds that this process has had a processor, and those that it has waited for a request."""

    waited = 0.0

    def __call__(self) -> float:
        return time.process_time() + self.waited

    def wait_until(self, moment: float) -> None:
        self.waited += max(moment - self(), 0)


class Moments:
    """Times of calls by the moment: those of the call of their shape that was on its way then, or came next;
    of shapes that did not run, those of the nearest in area, in proportion."""

    num_stages = 1

    def __init__(self, samples: list[Sample]):
        self.clock: Callable[[], float] = lambda: 0.0
        self.known: dict[Shape, list[tuple[float, float]]] = {}
        for sample in samples:
            self.known.setdefault(sample.shape, []).append((sample.at, sample.seconds))

    def __call__(self, call: StepCall) -> tuple[float]:
        own = [shape for shape in self.known if shape.phase == call.shape.phase]
        near = min(own, key=lambda shape: abs(shape.area - call.shape.area))
        found, now = self.known[near], self.clock()
        _, seconds = found[min(bisect_right(found, (now, math.inf)), len(found) - 1)]
        return (seconds * call.shape.area / near.area,)


def served(
    engine: Engine, entries: list[TraceEntry], clock: Wall | Processor
) -> tuple[dict[str, float], list[Sample], HostTimes]:
    """What requests see that arrive by a clock, the calls that were made, and the host's seconds."""
    begin, coming = clock(), list(enumerate(entries))
    samples: list[Sample] = []
    ended: list[Request] = []

    executor: Any = engine.executor
    own_run = executor.run

    def run(shape: Shape, arguments: Any, batch: Batch, *inputs: Any) -> Any:
        at = clock()
        given = jax.block_until_ready(own_run(shape, arguments, batch, *inputs))
        samples.append(Sample(clock() - begin, shape, int(batch.start.sum()), clock() - at))
        return given

    executor.run = run
    engine.stats.now = clock
    steps: list[Step] = []
    draw = np.random.default_rng()  # other prompts each time: none is found in the cache
    prompts = [draw.integers(3, 2000, e.prompt_tokens).tolist() for e in entries]
    while coming or engine.has_work:
        now = clock() - begin
        while coming and coming[0][1].arrival <= now:
            i, entry = coming.pop(0)
            end, own = (
                entry.prompt_tokens + entry.output_tokens,
                RequestTimes(begin + entry.arrival, now=clock),
            )
            engine.submit(Request(str(i), prompts[i], GREEDY_PARAMS, 0, end, arrival=i, times=own))
        if engine.has_work:
            steps.append(stepped(engine, clock, samples))
            ended += engine.take_ended()
        elif coming:
            clock.wait_until(begin + coming[0][1].arrival)
    seconds = max(r.times.finish for r in ended) - begin - entries[0].arrival
    metrics = [r.metrics() for r in ended]
    spans = {
        f"{name}_p{p}": float(np.percentile([getattr(m, name) for m in metrics], p))
        for name in ("ttft", "tpot")
        for p in (50, 99)
    }
    executor.run = own_run
    tokens = sum(m.num_generation_tokens for m in metrics)
    return spans | {"tokens_per_second": tokens / seconds}, samples, host_of(steps)


def stepped(engine: Engine, clock: Wall | Processor, samples: list[Sample]) -> Step:
    """Let the engine take a step."""
    calls, waiting, at = len(samples), len(engine.scheduler.waiting), clock()
    engine.step()
    beside = clock() - at - sum(sample.seconds for sample in samples[calls:])
    return Step(beside, len(engine.scheduler.running), waiting - len(engine.scheduler.waiting))


def host_of(steps: list[Step]) -> HostTimes:
    """The host's seconds by least squares; no part takes less than none."""
    told = np.array([(1, step.rows, step.seated) for step in steps], float)
    found = np.linalg.lstsq(told, np.array([step.seconds for step in steps]), rcond=None)[0]
    return HostTimes(*np.maximum(found, 0).tolist())


def simulated(
    llm: LLM, entries: list[TraceEntry], times: Moments | MeasuredTimes, host: HostTimes
) -> dict[str, float]:
    """The same in simulated time."""
    engine = llm.engine
    own = Simulation(
        engine.config.target,
        target_params(engine.all_params),
        llm.options,
        engine.sizes,
        times,
        "cpu",
        classes=engine.classes,
        host=host,
        inline=True,
    )
    if isinstance(times, Moments):
        times.clock = own.clock
    found = Fleet([own]).serve(entries)
    spans = {f"{name}_p{p}": found[name][f"p{p}"] for name in ("ttft", "tpot") for p in (50, 99)}
    return spans | {"tokens_per_second": found["tokens_per_second"]}


def compared(llm: LLM, entries: list[TraceEntry], clock: Wall | Processor) -> dict[str, Any]:
    """What requests see, what both simulations say, and how far these are off."""
    real, samples, host = served(llm.engine, entries, clock)
    lines = MeasuredTimes.of(sample[1:] for sample in samples)
    guesses = {
        "lines": simulated(llm, entries, lines, host),
        "moments": simulated(llm, entries, Moments(samples), host),
    }
    off = {way: {name: guess[name] / real[name] - 1 for name in real} for way, guess in guesses.items()}
    return {"real": real, "off": off, "host": host._asdict(), "ready": os.getloadavg()[0]} | guesses


def told(row: dict[str, Any]) -> str:
    lines, moments = row["off"]["lines"], row["off"]["moments"]
    spans = (f"{name} {x:.4g} ({lines[name]:+.0%}, {moments[name]:+.0%})" for name, x in row["real"].items())
    ready = f"{row['ready']:.0f} processes ready"
    return f"round {row['round']}, load {row['load']}: {'  '.join(spans)}; {ready}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--processor-time", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    clock = Processor() if args.processor_time else Wall()
    entries = [SCALE(e) for e in read(AZURE)[: args.requests]]
    rows: list[dict[str, Any]] = []
    with LLM(
        max_num_seqs=SEATS, max_model_len=LONGEST, max_prefill_tokens=256, background_compilation=False
    ) as llm:
        at_once = [TraceEntry(0.0, e.prompt_tokens, e.output_tokens) for e in entries]
        served(llm.engine, at_once, clock)
        best = served(llm.engine, at_once, clock)[0]["tokens_per_second"]
        rate = sum(e.output_tokens for e in entries) / (entries[-1].arrival - entries[0].arrival)
        for i in range(args.rounds):
            for share in LOADS:
                played = list(speed_up(entries, share * best / rate))
                rows.append({"round": i, "load": share} | compared(llm, played, clock))
                print(told(rows[-1]), flush=True)
    if args.json:
        about = {
            "date": str(date.today()),
            "machine": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "jax": jax.__version__,
            "model": "demo",
            "seats": SEATS,
            "requests": args.requests,
            "clock": type(clock).__name__,
            "xla_flags": os.environ.get("XLA_FLAGS"),
            "scale": asdict(SCALE),
            "bounds": BOUNDS,
            "best": best,
        }
        Path(args.json).write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
