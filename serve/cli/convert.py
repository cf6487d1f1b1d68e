"""`duetto convert`: write a model in another folder format, cast, smoothed or quantised if asked."""

import argparse
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from ...checkpoints import huggingface, orbax
from ...checkpoints.folders import atomic_folder, copy_description, require_free
from ...checkpoints.hub import resolve_model
from ...model.config import ModelConfig
from ...model.transformer import Decoder
from ...model.weights.compression.compress import DEQUANTIZE_FORM, WEIGHT_FORMS, convert_weight_form
from ...model.weights.compression.smoothing import (
    InputNorm,
    find_input_norms,
    measure_norm_outputs,
    smooth_params,
)
from ..engine.startup.dtype import checkpoint_dtype, normalise_dtype_name
from ..engine.startup.model_folder import read_model, read_param_shapes, write_orbax
from ..engine.startup.model_source import remaining_quantization
from ..host.progress import PATIENCE_SECONDS, track_items, write_progress_line
from ..host.signals import restore_interrupt_handler
from ..jobs.batch.prompts import PromptLine, read_prompt_lines
from ..options.engine import STORED_QUANTIZATIONS
from ..text.tokenizer.tokenizer import Tokenizer

FORMATS = ("orbax", "huggingface")
MAX_TEXTS, MAX_TEXT_TOKENS = 128, 512  # of a calibration; tokens of one text
MIN_PADDED_TOKENS = 64  # tokens; a text is padded to a power of two, so that few programs are compiled


def convert_model(
    source: str | Path,
    target: str | Path,
    form: str = "orbax",
    dtype: str = "auto",
    quantization: str | None = None,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    smooth: str | None = None,
) -> None:
    """Write the model of a folder or of an id on the hub as another folder; no accelerator is needed.

    `dtype` casts, "auto" keeps the source's own. `smooth` is a file of prompts, on which activations are
    measured that are then smoothed. The target appears when all of it is written. Raises ValueError
    (CheckpointError for a folder) for what cannot be read, written or overwritten.
    """
    target = Path(target)
    if form not in FORMATS:
        raise ValueError(f"format is {form!r}, expected one of {', '.join(FORMATS)}")
    if quantization not in (*WEIGHT_FORMS, *STORED_QUANTIZATIONS):
        raise ValueError(
            f"quantization is {quantization!r}, expected one of {', '.join(filter(None, WEIGHT_FORMS))}"
        )
    require_free(target)
    source = resolve_model(source, revision, download_dir=download_dir)
    quantization = remaining_quantization(source, quantization)
    dtype, device = normalise_dtype_name(dtype), jax.local_devices(backend="cpu")[0]
    if smooth is None:
        config, params = read_model(source, dtype, device, quantization)
    else:
        stored_form = quantization if quantization == DEQUANTIZE_FORM else None
        calibration = Calibration.read(smooth, source)
        check_plain_params(read_shapes(source, dtype, stored_form), "only arrays can be smoothed")
        config, params = read_model(source, dtype, device, stored_form)
        params = calibration.smooth(config, params)
        params = convert_weight_form(params, quantization, params.embed.dtype, donate=True)
    with atomic_folder(target) as folder:
        if form == "orbax":
            write_orbax(folder, source, params)
        else:
            copy_description(source, folder)
            check_plain_params(params, "only orbax folders hold such weights")
            huggingface.save_hf(folder, config, params, like=source)


def read_shapes(source: Path, dtype: str, quantization: str | None) -> Decoder:
    """Return the shapes of the parameters that `read_model` returns; no weight is read."""
    return read_param_shapes(source, checkpoint_dtype(source) if dtype == "auto" else dtype, quantization)


def check_plain_params(params: Decoder, reason: str) -> None:
    """Check that all parameters are arrays. Raises ValueError for one that is not, with the reason."""
    for path, record in orbax.describe_records(params).items():
        scheme = record.get("scheme")
        remedy = ", unless quantization is dequantize" if scheme else ""
        raise ValueError(f"parameter {path} is {scheme or 'factored'}: {reason}{remedy}")


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


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a Hugging Face or an Orbax folder, or an id on the hub")
    parser.add_argument("target", help="a folder that does not exist yet, or is empty")
    parser.add_argument("--revision", help="branch, tag or commit of an id")
    parser.add_argument("--download-dir", help="folder for downloaded models (default: the hub's cache)")
    parser.add_argument("--format", choices=FORMATS, default="orbax", help="format to write (default: orbax)")
    parser.add_argument(
        "--dtype",
        default="auto",
        help="data type of the weights: auto (default), float32, bfloat16 or float16",
    )
    parser.add_argument(
        "--quantization", metavar="SCHEME", help="int8, int4, fp8 or dequantize (default: as stored)"
    )
    parser.add_argument(
        "--smooth",
        metavar="CALIBRATION",
        help="file of prompts, as for `duetto batch`: outlier channels of activations are measured on them "
        "and moved into weights (SmoothQuant), before weights are quantised",
    )


def run(args: argparse.Namespace) -> int:
    restore_interrupt_handler()
    names = "source", "target", "format", "dtype", "quantization", "revision", "download_dir", "smooth"
    convert_model(*(vars(args)[name] for name in names))
    return 0
