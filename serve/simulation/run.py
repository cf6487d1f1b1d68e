"""A workload served by the real engine in simulated time, and what came of it."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from ...model.config import ModelConfig
from ...model.pair import PairConfig
from ...model.transformer import Decoder
from ...sampling.params import SamplingParams
from ..engine.engine import Engine
from ..engine.guessing import Speculation
from ..engine.meter import Sample
from ..engine.request import Clock, Request
from ..loading.start import limits_of
from ..options.engine import EngineOptions
from ..programs.classes import Classes
from ..programs.shapes import Sizes, can_share, table
from .clock import SimulatedClock
from .device import TOKEN, SimulatedPrograms
from .leap import leap
from .times import StepTimes
from .traces import BLOCK, Entry

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)
Host = Callable[[int], float]  # the host's seconds for a step of some rows


class Within(NamedTuple):
    """What requests are to keep: seconds to the first token, and between tokens on average."""

    ttft: float = math.inf
    tpot: float = math.inf

    def kept(self, ttft: float, tpot: float) -> bool:
        return ttft <= self.ttft and tpot <= self.tpot


ANY = Within()


@dataclass
class Tally:
    """What became of the requests so far: those that ended, in time or not, and those that were too long."""

    within: Within
    ended: int = 0
    in_time: int = 0
    left_out: int = 0
    first: float = math.inf  # arrival
    last: float = 0.0  # end
    queued: Sample = field(default_factory=Sample)

    def __call__(self, request: Request) -> None:
        m = request.metrics()
        self.ended += 1
        self.in_time += self.within.kept(m.ttft, m.tpot)
        self.first, self.last = min(self.first, m.arrival), max(self.last, m.arrival + m.e2e)
        self.queued.add(m.queued)

    @property
    def late(self) -> int:
        return self.ended - self.in_time + self.left_out


class Sure:
    """A drafter that always guesses; whether it is right the simulated device says."""

    def begin(self, request: Any, prompt: Any) -> None: ...

    def extend(self, request: Any, tokens: Any) -> None: ...

    def end(self, request: Any) -> None: ...

    def guess(self, request: Any, k: int) -> list[int]:
        return [TOKEN] * k


class Simulation:
    """The engine that a start would make of these options and sizes, on a device whose calls take `times`.

    `params` are shapes without numbers. All shapes of the table serve: which of them share a class is not
    known before they have run. On a host's own processor calls are `inline`.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Decoder,
        options: EngineOptions,
        sizes: Sizes,
        times: StepTimes,
        platform: str,
        acceptance: float = 0.0,
        host: Host = lambda rows: 0.0,
        classes: Classes | None = None,
        inline: bool = False,
    ):
        self.clock, self.host, self.sizes = SimulatedClock(), host, sizes
        pair = PairConfig(config).within(sizes.max_model_len)
        self.programs = SimulatedPrograms(pair, sizes, times, self.clock, acceptance, inline)
        shapes = table(options, sizes, can_share(pair.layers), platform)
        classes = classes or Classes.of(shapes, same_bits=True)
        limits = limits_of(options, sizes, classes.shapes, pair.block, times.stages)
        self.engine = Engine(
            cast(Any, self.programs),
            classes,
            self.programs.empty(params),
            limits,
            options.enable_prefix_caching,
            Speculation(Sure(), options.guesses) if options.guesses else None,
            clock=self.clock,
            told=cast(Any, lambda programs, shape, works: works),
        )
        self._count, self._patience = 0, options.patience(awaited=True)

    def serve(
        self,
        entries: Iterable[Entry],
        within: Within = ANY,
        most_late: float = math.inf,
        leaps: bool = True,
    ) -> dict[str, Any]:
        """Serve requests as they arrive, in order, until all have ended, or more than `most_late` have broken
        the limits; what came of it as plain numbers."""
        tally = self.engine.on_end = Tally(within)
        coming = self._fitting(entries, tally)
        entry = next(coming, None)
        while (entry is not None or self.engine.has_work) and tally.late <= most_late:
            while entry is not None and entry.arrival <= self.clock():
                self.engine.submit(self.request_of(entry))
                entry = next(coming, None)
            until = math.inf if entry is None else entry.arrival
            if self.engine.has_work:
                self._step(until, leaps)
            else:
                self.clock.wait_until(until)
        return outcome(self, tally, given_up=entry is not None or self.engine.has_work)

    def _step(self, until: float, leaps: bool) -> None:
        """A step of the engine, and those alike that follow before a moment. The host's work is behind the
        results that a step waits for, and before the next is planned."""
        self.engine.step()
        self.clock.spend(self.host(len(self.engine.scheduler.running)))
        if leaps:
            leap(self.engine, self.programs, until, self.host)

    def _fitting(self, entries: Iterable[Entry], tally: Tally) -> Iterator[Entry]:
        for entry in entries:
            if entry.prompt + entry.output > self.sizes.max_model_len:
                tally.left_out += 1
            else:
                yield entry

    def request_of(self, entry: Entry) -> Request:
        self._count += 1
        return Request(
            id=str(self._count),
            prompt=prompt_of(entry, own=-1 - self._count),
            params=GREEDY,
            seed=0,
            end=entry.prompt + entry.output,
            arrival=self._count,
            patience=self._patience,
            clock=Clock(entry.arrival, now=self.clock),
        )


def prompt_of(entry: Entry, own: int) -> list[int]:
    """Token ids of a prompt: those of a block are its name, and so are the same in every prompt that has it;
    the rest are the prompt's own."""
    tokens = [name + 1 for name in entry.blocks for _ in range(BLOCK)][: entry.prompt]
    return tokens + [own] * (entry.prompt - len(tokens))


def outcome(simulation: Simulation, tally: Tally, given_up: bool) -> dict[str, Any]:
    """The engine's own report, and what a planner wants to know beside it."""
    report, seconds = simulation.engine.report(), max(tally.last - tally.first, 1e-9)
    kept = (
        "ttft", "tpot", "e2e", "padding", "padding_prefill", "padding_decode", "peak_cache_occupancy",
        "prefix_hit_rate", "preemptions", "prompt_tokens", "generated_tokens", "bubbles", "steps",
        "step_seconds", "cache_pages", "page_size",
    )  # fmt: skip
    return {
        "requests": tally.ended,
        "left_out": tally.left_out,
        "given_up": given_up,
        "seconds": seconds,
        "in_time": tally.in_time / max(tally.ended + tally.left_out, 1),
        "goodput": tally.in_time / seconds,
        "tokens_per_second": report["generated_tokens"] / seconds,
        "queued": tally.queued.percentiles(),
        "busy": simulation.programs.stages.open / seconds,
    } | {name: report[name] for name in kept}
