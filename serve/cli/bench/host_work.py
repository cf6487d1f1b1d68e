"""Host work of a step: the time of an engine whose device takes none is all Python's."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from ....kvcache.pages import Batch
from ....model.config import ModelConfig
from ....model.draft_pair import PairConfig
from ....sampling.params import SamplingParams
from ....sampling.sample import Sampled
from ...engine.core.engine import Engine
from ...engine.core.scheduler_output import SchedulerConfig
from ...llm.input_processor import InputProcessor
from ...llm.session import Session
from ...llm.subscription import Subscription
from ...options.engine import EngineOptions
from ...runtime.compiled.lowering import StepArguments
from ...runtime.compiled.shapes import Shape, Sizes, can_share_prefill, min_row_tokens, shape_table
from ...runtime.equal_bits.classes import ShapeClasses
from ...runtime.executor import NullExecutor
from ...runtime.steps.output import NO_PROMPT_INPUTS, Output, PromptInputs
from ...text.tokenizer.tokenizer import Tokenizer

# Tokens of each request: it fills one row of a prefill, and frees its slot soon.
PROMPT_TOKENS, ANSWER_TOKENS = 24, 64
WARMUP_STEPS, TIMED_STEPS = 100, 400  # number of steps before timing, and of timed steps
TEXT_TOKENS = 256  # length of a fixed text that all rows sample


class InstantExecutor(NullExecutor):
    """Executor of a device that takes no time: rows sample the tokens of a fixed text, and each chunk of a
    prompt is its last."""

    def __init__(self, config: ModelConfig, sizes: Sizes):
        super().__init__(PairConfig(config), sizes)
        draw = np.random.default_rng(0)
        self._tokens = draw.integers(3, config.vocab_size, (TEXT_TOKENS, sizes.max_num_seqs), dtype=np.int32)
        self._step = 0

    def run(
        self,
        shape: Shape,
        arguments: StepArguments,
        batch: Batch,
        prompt_inputs: PromptInputs = NO_PROMPT_INPUTS,
    ) -> tuple[Any, Any, Output]:
        self._step = (self._step + 1) % TEXT_TOKENS
        rows = self._tokens[self._step, : shape.rows, None]
        tokens = rows if shape.phase == "prefill" else np.repeat(rows, shape.tokens, axis=1)
        return arguments.cache, arguments.slots, Output(Sampled(tokens, None, None, None, None))


def make_instant_engine(config: ModelConfig, params: Any, options: EngineOptions, num_slots: int) -> Engine:
    """Return an engine over `InstantExecutor`, with a CPU's shapes and a cache that holds every request."""
    longest = PROMPT_TOKENS + ANSWER_TOKENS
    pages = num_slots * (1 - -longest // options.page_size)
    sizes = Sizes(longest, num_slots, (pages,) * len(config.windows), options.page_size)
    options = EngineOptions(max_num_seqs=num_slots, page_size=options.page_size)
    shapes = shape_table(options, sizes, can_share_prefill(config.layers), "cpu")
    prefill, decode = (tuple(s for s in shapes if s.phase == phase) for phase in ("prefill", "decode"))
    limits = SchedulerConfig(num_slots, options.prefill_tokens, min_row_tokens(prefill), decode_steps=1)
    executor = InstantExecutor(config, sizes)
    classes = ShapeClasses(prefill, decode, same_bits=True)
    return Engine(executor, classes, executor.fresh_arguments(params), limits, prefix_caching=True)


def measure_host_step(
    config: ModelConfig, params: Any, tokenizer: Tokenizer | None, options: EngineOptions, num_slots: int
) -> float:
    """Return the median seconds of a step in which `num_slots` requests run: planning, prompts that take free
    slots, results and their text."""
    engine = make_instant_engine(config, params, options, num_slots)
    session = Session(engine)
    processor = InputProcessor(
        config.vocab_size, PROMPT_TOKENS + ANSWER_TOKENS, options, tokenizer, eos_ids=()
    )
    subscriptions = host_subscriptions(processor, config.vocab_size)
    step_times: list[float] = []
    for step in range(WARMUP_STEPS + TIMED_STEPS):
        while session.num_queued < 4 * num_slots:
            session.enqueue([next(subscriptions)])
        begin = time.perf_counter()
        session.step()
        step_times += [time.perf_counter() - begin] if step >= WARMUP_STEPS else []
    session.close()
    return statistics.median(step_times)


def host_subscriptions(processor: InputProcessor, vocabulary: int) -> Iterator[Subscription]:
    """Yield subscriptions, without end: answers of various lengths, whose first tokens have no reader."""
    draw = np.random.default_rng(1)
    while True:
        length = int(draw.integers(2, ANSWER_TOKENS))
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        prompt = draw.integers(3, vocabulary, PROMPT_TOKENS).tolist()
        yield processor.make_subscription(prompt, params, is_awaited=False)
