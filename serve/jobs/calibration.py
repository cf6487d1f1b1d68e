"""Texts of `duetto convert --smooth`, on which the outputs of norms are measured."""

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from ...checkpoints import huggingface
from ...model.config import ModelConfig
from ...model.transformer import Decoder
from ...model.weights.compression.smoothing import (
    InputNorm,
    find_input_norms,
    measure_norm_outputs,
    smooth_params,
)
from ..host.progress import PATIENCE_SECONDS, track_items, write_progress_line
from ..text.tokenizer.tokenizer import Tokenizer
from .batch.prompts import PromptLine, read_prompt_lines

MAX_TEXTS, MAX_TEXT_TOKENS = 128, 512  # of a calibration; tokens of one text
MIN_PADDED_TOKENS = 64  # tokens; a text is padded to a power of two, so that few programs are compiled


@dataclass(frozen=True)
class Calibration:
    """Texts on which the outputs of norms are measured.

    file: name of the file of the texts.
    prompts: texts, each at most MAX_TEXT_TOKENS tokens long.
    norms: norms that factors are folded into.
    """

    file: str
    prompts: list[PromptLine]
    norms: list[InputNorm]

    @classmethod
    def read(cls, file: str, source: Path) -> "Calibration":
        """Read the first texts of a file of `duetto batch`, for the model of a folder; no weight is read.

        Prints what is read, and which norms are left as they are. Raises ValueError for a text that is not
        allowed, for a file without texts, and for a model whose norms all have an obstacle.
        """
        config = huggingface.read_config(source)
        norms = find_smoothable_norms(config)
        lines = islice(read_prompt_lines(file, Tokenizer.from_folder(source)), MAX_TEXTS)
        prompts = [cut_prompt(file, line, config) for line in lines]
        if not prompts:
            raise ValueError(f"{file}: there is no prompt in it")
        num_tokens = sum(len(prompt.ids) for prompt in prompts)
        write_progress_line(
            f"smoothing by {file}: {len(prompts)} prompts of at most {MAX_TEXTS}, {num_tokens} tokens, "
            f"at most {MAX_TEXT_TOKENS} of a prompt"
        )
        return cls(file, prompts, norms)

    def smooth(self, config: ModelConfig, params: Decoder) -> Decoder:
        """Return smoothed parameters; the arrays that they replace are deleted. Raises ValueError for an
        output of a norm that is not finite."""
        maxima: dict[str, Any] = {norm.path: np.float32(0) for norm in self.norms}
        for prompt in track_items(self.prompts, "measuring activations", PATIENCE_SECONDS):
            for path, values in self.measure_prompt(config, params, prompt).items():
                maxima[path] = np.maximum(maxima[path], values)
        return smooth_params(params, self.norms, maxima, donate=True)

    def measure_prompt(
        self, config: ModelConfig, params: Decoder, prompt: PromptLine
    ) -> dict[str, Float32[np.ndarray, " D"]]:
        """Return the largest magnitude of each channel of the norms' outputs over a prompt, by path."""
        padded = max(MIN_PADDED_TOKENS, 1 << (len(prompt.ids) - 1).bit_length())
        tokens = np.zeros((1, padded), np.int32)
        tokens[0, : len(prompt.ids)] = prompt.ids
        paths = tuple(norm.path for norm in self.norms)
        maxima = measure_norm_outputs(params, config, paths, jnp.asarray(tokens), jnp.int32(len(prompt.ids)))
        for path in paths:
            if not np.isfinite(maxima[path]).all():
                raise ValueError(
                    f"{self.file}: line {prompt.number}: the output of {path} holds NaN or infinity in "
                    f"{params.embed.dtype}: nothing can be smoothed by it"
                )
        return {path: np.asarray(values) for path, values in maxima.items()}


def find_smoothable_norms(config: ModelConfig) -> list[InputNorm]:
    """Return the norms that factors can be folded into, and print the others. Raises ValueError if there are
    none."""
    norms = find_input_norms(config)
    paths_by_obstacle: dict[str, list[str]] = {}
    for norm in norms:
        paths_by_obstacle.setdefault(norm.obstacle, []).append(norm.path)
    smoothable = paths_by_obstacle.pop("", [])
    others = [f"{obstacle}: {', '.join(paths)}" for obstacle, paths in paths_by_obstacle.items()]
    if not smoothable:
        raise ValueError(f"no norm of this model can be smoothed; {'; '.join(others)}")
    for reason in others:
        write_progress_line(f"not smoothed, {reason}")
    return [norm for norm in norms if not norm.obstacle]


def cut_prompt(file: str, line: PromptLine, config: ModelConfig) -> PromptLine:
    """Return a prompt cut to the tokens that are measured. Raises ValueError for a prompt that is empty, and
    for a token that the model does not have."""
    if not line.ids:
        raise ValueError(f"{file}: line {line.number}: the prompt is empty")
    outside = next((i for i in line.ids if not 0 <= i < config.vocab_size), None)
    if outside is not None:
        raise ValueError(
            f"{file}: line {line.number}: token {outside} is not allowed: 0 to {config.vocab_size - 1}, "
            "the model's vocabulary"
        )
    return replace(line, ids=line.ids[: min(MAX_TEXT_TOKENS, config.max_position)])
