"""The real engine in simulated time, and the requests of a workload for it."""

from collections.abc import Callable

from ....model.config import ModelConfig
from ....model.pair import PairConfig
from ....model.transformer import Decoder
from ....sampling.params import SamplingParams
from ...engine.core.engine import Engine
from ...engine.core.guessing import Speculation
from ...engine.core.request import Request, RequestTimes
from ...engine.speculation.drafter import ConstantDrafter
from ...engine.startup.start import limits_of
from ...options.engine import EngineOptions
from ...runtime.compiled.shapes import Sizes, shapes_of
from ...runtime.equal_bits.classes import ShapeClasses
from ..workloads.traces import BLOCK, TraceEntry
from .device import TOKEN, SimulatedClock, SimulatedPrograms
from .times import Host, StepTimes
from .together import DecodeFastForward

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)
NO_TIME = Host()


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
        host: Host = NO_TIME,
        classes: ShapeClasses | None = None,
        inline: bool = False,
    ):
        self.clock, self.host, self.sizes = SimulatedClock(), host, sizes
        pair = PairConfig(config).within(sizes.max_model_len)
        self.programs = SimulatedPrograms(pair, sizes, times, self.clock, acceptance, inline, host.seat)
        shapes = shapes_of(options, sizes, pair.layers, platform, params.embed.dtype)
        classes = classes or ShapeClasses.of(shapes, same_bits=True)
        limits = limits_of(options, sizes, classes.shapes, pair.block, times.stages)
        self.engine = Engine(
            self.programs,
            classes,
            self.programs.empty(params),
            limits,
            options.enable_prefix_caching,
            Speculation(ConstantDrafter(TOKEN), options.guesses) if options.guesses else None,
            clock=self.clock,
        )
        self.together: DecodeFastForward | None = DecodeFastForward(self.engine, self.programs)
        self._count, self._patience = 0, options.patience(awaited=True)

    @property
    def is_idle(self) -> bool:
        return not self.engine.has_work

    def arrive(self, request: Request, moment: float) -> None:
        """Put a request into the queue at a moment."""
        self.clock.wait_until(moment)
        self.engine.submit(request)

    def advance(self, until: float, enough: Callable[[], bool] = lambda: False) -> None:
        """Take steps until a moment, while there are requests and `enough()` is False."""
        while not self.is_idle and self.clock() < until and not enough():
            self._step()

    def _step(self) -> None:
        """A step of the engine. The host's work for its rows is behind the results that it waits for, and
        before the next is planned; that for a request which takes a seat is before its first call."""
        if self.together is None or not self.together.step():
            self.engine.step()
        self.clock.spend(self.host.step + self.host.row * len(self.engine.scheduler.running))

    def request_of(self, entry: TraceEntry) -> Request:
        self._count += 1
        return Request(
            id=str(self._count),
            prompt=prompt_of(entry, own=-1 - self._count),
            params=GREEDY,
            seed=0,
            end=entry.prompt + entry.output,
            arrival=self._count,
            patience=self._patience,
            clock=RequestTimes(entry.arrival, now=self.clock),
        )


def prompt_of(entry: TraceEntry, own: int) -> list[int]:
    """Return token ids for a prompt. Those of a block are its name, so that prompts share it; the rest are
    the prompt's own."""
    tokens = [name + 1 for name in entry.blocks for _ in range(BLOCK)][: entry.prompt]
    return tokens + [own] * (entry.prompt - len(tokens))
