"""The real engine in simulated time, and the requests of a workload for it."""

from collections.abc import Callable

from ....model.config import ModelConfig
from ....model.draft_pair import PairConfig
from ....model.transformer import Decoder
from ....sampling.params import SamplingParams
from ...engine.core.engine import Engine
from ...engine.core.request import Request, RequestTimes
from ...engine.core.speculation import Speculation
from ...engine.speculation.drafter import ConstantDrafter
from ...engine.startup.start import make_scheduler_config
from ...options.engine import EngineOptions
from ...runtime.compiled.shapes import Sizes, engine_shapes
from ...runtime.equal_bits.classes import ShapeClasses
from ..workloads.traces import BLOCK_TOKENS, TraceEntry
from .device import SAMPLED_TOKEN, SimulatedClock, SimulatedExecutor
from .step_times import HostTimes, StepTimes

GREEDY_PARAMS = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)
NO_HOST_TIME = HostTimes()


class Simulation:
    """The engine that a start would build of these options and sizes. Its device's calls take `times`.

    `params` are shapes without numbers. All shapes of the table serve, because classes of equal bits are
    known only after a run. Calls are `inline` on a host's own processor.
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
        host: HostTimes = NO_HOST_TIME,
        classes: ShapeClasses | None = None,
        inline: bool = False,
    ):
        self.clock, self.host, self.sizes = SimulatedClock(), host, sizes
        pair = PairConfig(config).drop_unreached_limits(sizes.max_model_len)
        self.executor = SimulatedExecutor(pair, sizes, times, self.clock, acceptance, inline, host.slot)
        shapes = engine_shapes(options, sizes, pair.layers, platform, params.embed.dtype)
        classes = classes or ShapeClasses.from_shapes(shapes, same_bits=True)
        limits = make_scheduler_config(
            options, sizes, classes.shapes, pair.prefill_alignment, times.num_stages
        )
        self.engine = Engine(
            self.executor,
            classes,
            self.executor.fresh_arguments(params),
            limits,
            options.enable_prefix_caching,
            Speculation(ConstantDrafter(SAMPLED_TOKEN), options.max_draft_tokens)
            if options.max_draft_tokens
            else None,
            clock=self.clock,
            make_batch=lambda sizes, shape, scheduled_rows: scheduled_rows,
        )
        self.on_request_end: Callable[[Request], None] = lambda request: None
        self._count, self._prefill_delay = 0, options.prefill_delay(is_awaited=True)

    @property
    def is_idle(self) -> bool:
        return not self.engine.has_work

    def submit_at(self, request: Request, moment: float) -> None:
        """Add a request to the queue at a moment."""
        self.clock.wait_until(moment)
        self.engine.submit(request)

    def advance(self, end: float, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Take steps until a moment, while there are requests and `is_enough()` is False."""
        while not self.is_idle and self.clock() < end and not is_enough():
            self._step()

    def _step(self) -> None:
        """Take a step of the engine. The host's work for its rows comes after the results that the step waits
        for, and before the next plan. The host's work for an admitted request comes before its first call."""
        self.engine.step()
        for request in self.engine.take_ended():
            self.on_request_end(request)
        self.clock.spend(self.host.step + self.host.row * len(self.engine.scheduler.running))

    def make_request(self, entry: TraceEntry) -> Request:
        """Return a greedy request with the lengths and the arrival of an entry."""
        self._count += 1
        return Request(
            id=str(self._count),
            prompt=make_prompt_ids(entry, filler_token=-1 - self._count),
            params=GREEDY_PARAMS,
            seed=0,
            end=entry.prompt_tokens + entry.output_tokens,
            arrival=self._count,
            max_prefill_delay=self._prefill_delay,
            times=RequestTimes(entry.arrival, now=self.clock),
        )


def make_prompt_ids(entry: TraceEntry, filler_token: int) -> list[int]:
    """Return token ids for a prompt. A block's ids follow from its name, so that prompts share them. The rest
    of the prompt is the token `filler_token`."""
    tokens = [name + 1 for name in entry.blocks for _ in range(BLOCK_TOKENS)][: entry.prompt_tokens]
    return tokens + [filler_token] * (entry.prompt_tokens - len(tokens))
