"""`duetto convert`: write a model in another folder format, cast, smoothed or quantised if asked."""

import argparse
from pathlib import Path

import jax

from ...checkpoints import huggingface, orbax
from ...checkpoints.folders import atomic_folder, copy_description, require_free
from ...checkpoints.hub import resolve_model
from ...model.transformer import Decoder
from ...model.weights.compression.compress import DEQUANTIZE_FORM, WEIGHT_FORMS, convert_weight_form
from ..engine.startup.dtype import checkpoint_dtype, normalise_dtype_name
from ..engine.startup.model_folder import read_model, read_param_shapes, write_orbax
from ..engine.startup.model_source import remaining_quantization
from ..host.signals import restore_interrupt_handler
from ..jobs.calibration import Calibration
from ..options.engine import STORED_QUANTIZATIONS

FORMATS = ("orbax", "huggingface")


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
