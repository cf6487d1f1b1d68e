"""The function by which a trainer computes log-probabilities as an engine does."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float32, Int

from ....kvcache.quantised import choose_cache_format
from ....kvcache.stages import tree_devices
from ....model.config import ModelConfig
from ....model.gpus import target_device
from ....model.transformer import Decoder
from ....model.weights.cpu.packed import kernel_isa
from ....model.weights.cpu.panels import Packed
from ....model.weights.device_forms import DeviceForms, restore_params
from ....model.weights.quant import Quantised
from ....sampling.checks import RAW_LOGPROBS
from ....train.checks import explain_inexact, require_exact
from ....train.engine_steps import EngineSteps
from ....train.logprobs import ServedModel
from ....train.scoring import score_by_kernels
from ...engine.core.engine import Engine
from ...options.engine import EngineOptions
from ...runtime.compiled.shapes import CanonicalShapes
from ..input_processor import InputProcessor
from ..session import Session
from .likelihood import score_by_decoding

PROBED_TOKENS = 16  # sampled tokens of each text by which a replay is compared with an engine


def make_logprobs_fn(session: Session, processor: InputProcessor) -> Callable[..., Any]:
    """Return `f(params, tokens, lengths=None, temperature=1.0, prompt_lengths=None)`: `train.token_logprobs`
    with the bits of an engine. Parameters may be of another dtype, such as masters in float32.

    CPU kernels compute whole texts where they make all bits of all steps. Elsewhere the function replays the
    engine's steps, and needs the lengths of prompts. Then it is compared with the engine here, on two texts.
    Raises ValueError where the bits cannot be had.
    """
    engine, options = session.engine, processor.options
    require_exact(explain_inexact_engine(engine, options))
    config, dtype = engine.config.target, engine.params.embed.dtype
    if (isa := choose_kernels(engine)) is not None:
        return ServedModel(config, dtype, partial(score_by_kernels, isa=isa)).token_logprobs
    steps = make_steps(engine, options)
    compute = ServedModel(config, dtype, steps.score).token_logprobs
    texts = ProbedTexts.draw(config, options, engine.programs.sizes.max_model_len, steps.chunk_tokens)
    sampled = texts.sample(session, processor)
    is_equal = np.array_equal(texts.replay(restore_params(engine.params), compute), sampled)
    require_exact("" if is_equal else "a replay of the engine's steps has other bits than its samples")
    return compute


def explain_inexact_engine(engine: Engine, options: EngineOptions) -> str:
    """Return why a trainer cannot have an engine's bits; "" if it can."""
    dtype, params = engine.params.embed.dtype, engine.params
    devices = tree_devices(params)
    if len(devices) > 1:
        return f"the engine is on {len(devices)} devices, whose sums are added up in another order"
    if (platforms := {device.platform for device in devices}) != {target_device().platform}:
        return f"the engine is on a {platforms.pop()}, and functions are compiled for another platform"
    if not options.reproducible:
        return "the engine has reproducible=False"
    if options.logits_processors and options.logprobs_mode != RAW_LOGPROBS:
        return f"logits processors change what logprobs_mode={options.logprobs_mode!r} reports"
    if has_codes(params):
        return f"the engine's weights are codes (quantization={options.quantization!r})"
    if choose_cache_format(options.kv_cache_dtype, dtype) != dtype:
        return f"the engine's cache is not of {dtype} (kv_cache_dtype={options.kv_cache_dtype!r})"
    return ""


def choose_kernels(engine: Engine) -> str | None:
    """Return the instruction set of the CPU kernels that make all of an engine's bits, if any do."""
    differs = engine.warmup is None and not engine.classes.same_bits
    is_covered = not differs and not explain_inexact(engine.config.target, engine.params.embed.dtype)
    return kernel_isa(engine.params) if is_covered else None


def make_steps(engine: Engine, options: EngineOptions) -> EngineSteps:
    """Return an engine's canonical steps."""
    sizes, (device,) = engine.programs.sizes, tree_devices(engine.params)
    canonical = CanonicalShapes.choose(device.platform, options, sizes)
    rows, chunk = canonical.decode_shape.rows, canonical.prefill_shape.tokens
    return EngineSteps(rows, chunk, sizes.page_size, DeviceForms.from_params(engine.params))


class ProbedTexts(NamedTuple):
    """Two texts by which a replay is compared with an engine.

    tokens: int32 [2,T].
    starts: numbers of tokens of their prompts, a short one and the longest that may be.
    num_scored: number of tokens behind each prompt.
    """

    tokens: Int[np.ndarray, "2 T"]
    starts: list[int]
    num_scored: int

    @classmethod
    def draw(
        cls, config: ModelConfig, options: EngineOptions, max_model_len: int, chunk: int
    ) -> "ProbedTexts":
        """Draw texts of more than a chunk, as far as the engine allows them."""
        limits = max_model_len, config.longrope_boundary, chunk + 3 * PROBED_TOKENS
        T = min(limit for limit in limits if limit is not None)
        count = min(PROBED_TOKENS, T // 2, options.max_output_length or T)
        longest = min(T - count, options.max_input_length or T)
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, T), dtype=np.int32)
        return cls(tokens, [min(5, longest), longest], count)

    def sample(self, session: Session, processor: InputProcessor) -> Float32[np.ndarray, "2 scored"]:
        """Return the log-probabilities that an engine reports for the tokens behind the prompts."""
        rows = list(zip(self.tokens, self.starts, strict=True))
        prompts = [row[:start].tolist() for row, start in rows]
        answers = [row[start:][: self.num_scored].tolist() for row, start in rows]
        samples = score_by_decoding(session, processor, prompts, answers, [None] * len(prompts))
        return np.array([sample.logprobs for sample in samples], np.float32)

    def replay(self, params: Decoder, compute: Callable[..., Any]) -> Float32[np.ndarray, "2 scored"]:
        """Return the log-probabilities that a replay computes of these tokens."""
        starts = np.array(self.starts)
        scores = jax.jit(compute)(params, self.tokens, starts + self.num_scored, prompt_lengths=starts)
        columns = starts[:, None] - 1 + np.arange(self.num_scored)
        return np.take_along_axis(np.asarray(scores), columns, axis=1)


def has_codes(params: Decoder) -> bool:
    """Return True if weights are quantised, packed for kernels or not."""
    records = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Packed | Quantised))
    return any(isinstance(x, Quantised) or isinstance(x, Packed) and x.codes for x in records)
