"""Host work of a step: the time of an engine whose device takes none is all Python's."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from ....kvcache.pages import Batch
from ....model.config import ModelConfig
from ....model.pair import PairConfig
from ....sampling.params import SamplingParams
from ....sampling.sample import Sampled
from ...engine.core.engine import Engine
from ...engine.core.plan import SchedulerConfig
from ...llm.input_processor import InputProcessor
from ...llm.request_group import RequestGroup
from ...llm.session import Session
from ...options.engine import EngineOptions
from ...runtime.compiled.batches import BatchRow, batch_of
from ...runtime.compiled.compile import StepArguments
from ...runtime.compiled.shapes import Shape, Sizes, can_share, least_row, table
from ...runtime.equal_bits.classes import ShapeClasses
from ...runtime.programs import NullPrograms
from ...runtime.steps.step import Output
from ...text.tokenizer.tokenizer import Tokenizer

PROMPT, ANSWER = 24, 64  # tokens of each request: one row of a prefill, and a seat that is taken anew
WARM, STEPS = 100, 400  # steps before, and those that are timed
TOKENS = 256  # of a fixed text that all rows sample


class IdlePrograms(NullPrograms):
    """Programs of a device that takes no time: rows sample the tokens of a fixed text, and each chunk of a
    prompt is its last."""

    def __init__(self, config: ModelConfig, sizes: Sizes):
        super().__init__(PairConfig(config), sizes)
        draw = np.random.default_rng(0)
        self._tokens = draw.integers(3, config.vocab_size, (TOKENS, sizes.max_num_seqs), dtype=np.int32)
        self._step = 0

    def batch(self, shape: Shape, rows: Mapping[int, BatchRow]) -> Batch:
        return batch_of(self.sizes, shape, rows)

    def run(self, shape: Shape, arguments: StepArguments, batch: Batch) -> tuple[Any, Any, Output]:
        self._step = (self._step + 1) % TOKENS
        rows = self._tokens[self._step, : shape.rows, None]
        tokens = rows if shape.phase == "prefill" else np.repeat(rows, shape.tokens, axis=1)
        return arguments.cache, arguments.slots, Output(Sampled(tokens, None, None, None, None), None)


def idle_engine(config: ModelConfig, params: Any, options: EngineOptions, seats: int) -> Engine:
    """Return an engine over `IdlePrograms`, with a CPU's shapes and a cache that holds every request."""
    longest = PROMPT + ANSWER
    pages = seats * (1 - -longest // options.page_size)
    sizes = Sizes(longest, seats, (pages,) * len(config.windows), options.page_size)
    options = EngineOptions(max_num_seqs=seats, page_size=options.page_size)
    shapes = table(options, sizes, can_share(config.layers), "cpu")
    prefill, decode = (tuple(s for s in shapes if s.phase == phase) for phase in ("prefill", "decode"))
    limits = SchedulerConfig(seats, options.prefill_tokens, least_row(prefill), decode_steps=1)
    programs = IdlePrograms(config, sizes)
    classes = ShapeClasses(prefill, decode, same_bits=True)
    return Engine(programs, classes, programs.empty(params), limits, prefix_caching=True)


def step_seconds(
    config: ModelConfig, params: Any, tokenizer: Tokenizer | None, options: EngineOptions, seats: int
) -> float:
    """Return the median seconds of a step in which `seats` requests run: planning, prompts that take free
    slots, results and their text."""
    engine = idle_engine(config, params, options, seats)
    session = Session(engine)
    processor = InputProcessor(config.vocab_size, PROMPT + ANSWER, options, tokenizer, eos_ids=())
    asked = asking(processor, config.vocab_size)
    spent: list[float] = []
    for step in range(WARM + STEPS):
        while session.count_queued < 4 * seats:
            session.queue(session.groups_of([next(asked)]))
        begin = time.perf_counter()
        session.step()
        spent += [time.perf_counter() - begin] if step >= WARM else []
    session.close()
    return statistics.median(spent)


def asking(processor: InputProcessor, vocabulary: int) -> Iterator[Callable[[str], RequestGroup]]:
    """Yield makers of requests, without end: answers of various lengths, whose first tokens have no
    reader."""
    draw = np.random.default_rng(1)
    while True:
        length = int(draw.integers(2, ANSWER))
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        prompt = draw.integers(3, vocabulary, PROMPT).tolist()
        yield partial(processor.group, prompt=prompt, params=params, awaited=False)
