"""`duetto convert`: write a model in another folder format, cast or quantised if asked."""

import argparse
from pathlib import Path

import jax

from ...checkpoints import huggingface, orbax
from ...checkpoints.folders import copy_description, fresh, require_free
from ...checkpoints.hub import resolve
from ...model.transformer import Decoder
from ...model.weights.compress import FORMS
from ..engine.startup.dtype import dtype_name
from ..engine.startup.folder import read_folder, write_orbax
from ..engine.startup.origin import stored_form
from ..host.signals import raise_on_interrupt
from ..options.engine import STORED

FORMATS = ("orbax", "huggingface")


def convert(
    source: str | Path,
    target: str | Path,
    form: str = "orbax",
    dtype: str = "auto",
    quantization: str | None = None,
    revision: str | None = None,
    download_dir: str | Path | None = None,
) -> None:
    """Write the model of a folder or of an id on the hub as another folder; no accelerator is needed.

    `dtype` casts, "auto" keeps the source's own. The target appears when all of it is written. Raises
    ValueError (CheckpointError for a folder) for what cannot be read, written or overwritten.
    """
    target = Path(target)
    if form not in FORMATS:
        raise ValueError(f"format is {form!r}, expected one of {', '.join(FORMATS)}")
    if quantization not in (*FORMS, *STORED):
        raise ValueError(
            f"quantization is {quantization!r}, expected one of {', '.join(filter(None, FORMS))}"
        )
    require_free(target)
    source = resolve(source, revision, download_dir=download_dir)
    quantization = stored_form(source, quantization)
    config, params = read_folder(source, dtype_name(dtype), jax.local_devices(backend="cpu")[0], quantization)
    with fresh(target) as folder:
        if form == "orbax":
            write_orbax(folder, source, params)
        else:
            copy_description(source, folder)
            refuse_records(params)
            huggingface.save(folder, config, params, like=source)


def refuse_records(params: Decoder) -> None:
    for path, record in orbax.records_of(params).items():
        scheme = record.get("scheme")
        remedy = ", unless quantization is dequantize" if scheme else ""
        raise ValueError(
            f"parameter {path} is {scheme or 'factored'}: only orbax folders hold such weights{remedy}"
        )


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


def run(args: argparse.Namespace) -> int:
    raise_on_interrupt()
    names = "source", "target", "format", "dtype", "quantization", "revision", "download_dir"
    convert(*(vars(args)[name] for name in names))
    return 0
