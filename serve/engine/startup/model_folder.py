"""A model's folder: its parameters in a dtype, and its generation defaults."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from .... import checkpoints
from ....checkpoints import huggingface, orbax
from ....checkpoints.folders import copy_description, outer_model_type
from ....checkpoints.generation import GenerationDefaults, read_generation_config
from ....checkpoints.huggingface import read_config
from ....checkpoints.tensors import CheckpointError
from ....model.config import ModelConfig
from ....model.sharding import place_on_devices
from ....model.transformer import Decoder, decoder_spec
from ....model.tree import init_params, shapes_from_specs
from ....model.weights.compression.compress import convert_weight_form, quantise_inputs
from ....model.weights.device_forms import DeviceForms, lay_out_params
from ....model.weights.schemes import SCHEMES
from ....sampling.params import MAX_STOP_IDS, SamplingParams
from ...host import progress
from ...host.devices import default_device, memory_limit
from ...options.engine import EngineOptions
from ...runtime.multihost.rendezvous import check_same_weight_files
from .cpu_kernels import build_kernels_if_requested
from .dtype import (
    TOO_LARGE,
    agree_on_dtype,
    check_kv_cache_dtype,
    checkpoint_dtype,
    may_overflow_float16,
    normalise_dtype_name,
)
from .mesh import make_layout, param_shardings
from .stage_shardings import with_last_stage_head

DEFAULT_OPTIONS = EngineOptions()
DEMO_FOLDER = Path(checkpoints.__file__).parent / "demo"


def load_folder(
    path: Path,
    dtype: Any,
    mesh: Mesh | None = None,
    options: EngineOptions = DEFAULT_OPTIONS,
) -> tuple[ModelConfig, Decoder, GenerationDefaults]:
    """Load a model folder; returns its configuration, parameters and generation defaults.

    Parameters are sharded by the rules of `model.sharding`, over `mesh` or by the options' sizes. With the
    load format "dummy" they are random.

    Raises CheckpointError for the folder. Raises ValueError for sizes that the mesh does not divide, and if
    processes of a group have different files.
    """
    defaults = read_generation_defaults(path)
    device = default_device() if mesh is None else mesh.devices.flat[0]
    options.with_device_load(memory_limit(device)).check_stages(options.num_device_groups)
    check_kv_cache_dtype(options, device)
    build_kernels_if_requested(options, device.platform)
    config = read_config(path)
    placement = param_shardings(config, make_layout(options), mesh) or device
    is_random = options.load_format == "dummy"
    read = init_random_model if is_random else read_model
    chosen = agree_on_dtype(dtype, device, config, None if is_random else path, options.cpu_kernels)
    if normalise_dtype_name(dtype) == "auto" and chosen in (jnp.bfloat16, jnp.float16):
        is_forced = device.platform != "cpu" and may_overflow_float16(config)
        reason = TOO_LARGE if is_forced else "which this processor multiplies faster"
        progress.write_progress_line(f"computing in {chosen}, {reason}; the choice is dtype's")
    check_same_weight_files(path)
    if options.activations and not is_random:
        stored_dtype = checkpoint_dtype(path) if isinstance(chosen, str) else chosen
        quantise_inputs(read_param_shapes(path, stored_dtype, options.quantization), options.activations)
    config, params = read(path, chosen, placement, options.quantization)
    if not config.has_head:
        progress.write_progress_line(
            "the folder stores no lm_head: the model makes embeddings, and generates no text"
        )
    params = with_last_stage_head(params)
    return config, convert_to_engine_layout(params, options), defaults


def convert_to_engine_layout(params: Decoder, options: EngineOptions) -> Decoder:
    """Return parameters in the layout that their device multiplies. Arrays that are copied are donated."""
    return lay_out_params(params, choose_device_forms(options), donate=True)


def choose_device_forms(options: EngineOptions) -> DeviceForms:
    """Return the forms of weights that an engine with these options uses."""
    scheme = SCHEMES.get(options.quantization or "")
    tied_head = "int8" if scheme and scheme.has_cpu_kernel else None  # else in its dtype
    return DeviceForms(
        bool(options.cpu_kernels),
        tied_head,
        options.can_fuse_qkv,
        options.batch_invariant_matmul,
        options.activations,
    )


def read_generation_defaults(path: Path) -> GenerationDefaults:
    """Return a folder's generation defaults. Raises CheckpointError, with file and field, if the sampler's
    limits do not allow them."""
    defaults, file = read_generation_config(path), path / "generation_config.json"
    try:
        SamplingParams.from_dict(defaults.sampling)
    except (ValueError, TypeError, OverflowError) as e:
        raise CheckpointError(f"{file}: {e}".replace("max_tokens", "max_new_tokens")) from e
    count = len(set(defaults.eos_token_ids))
    if count > MAX_STOP_IDS:
        raise CheckpointError(f"{path}: eos_token_id has {count} ids, expected at most {MAX_STOP_IDS}")
    return defaults


def read_model(
    path: Path, dtype: Any, placement: Any, quantization: str | None = None
) -> tuple[ModelConfig, Decoder]:
    """Read the model of a Hugging Face folder, or of a folder of `duetto convert`.

    placement: a device, or shardings of the parameters.
    """
    placement = SingleDeviceSharding(placement) if isinstance(placement, jax.Device) else placement
    if not orbax.is_orbax(path):
        track = partial(progress.track_items, what="reading weights", patience=progress.PATIENCE_SECONDS)
        loaded = huggingface.load_hf(path, dtype, placement, quantization=quantization, track=track)
        if (kind := outer_model_type(path)) is not None:
            progress.write_progress_line(
                f"of a folder of {kind} the text's model is read; what reads images is not"
            )
        return loaded
    config, params = orbax.load_orbax(path, dtype, placement)
    return config, convert_weight_form(params, quantization, params.embed.dtype, donate=True)


def write_orbax(folder: Path, source: Path, params: Decoder) -> None:
    """Write parameters and the description of their model into a new folder, by `orbax.save_orbax`.

    The description is copied from `source`, the folder of the model, without `quantization_config`.
    """
    copy_description(source, folder)
    raw = json.loads((folder / "config.json").read_bytes())
    if raw.pop("quantization_config", None) is not None:
        (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    orbax.save_orbax(folder, params)


def init_random_model(
    path: Path, dtype: Any, placement: Any, quantization: str | None = None
) -> tuple[ModelConfig, Decoder]:
    """Return the model of a folder's `config.json` with random weights, equal at each start.

    The dtype "auto" is bfloat16.
    """
    placement = SingleDeviceSharding(placement) if isinstance(placement, jax.Device) else placement
    config = read_config(path)
    chosen = jnp.dtype("bfloat16" if dtype == "auto" else dtype)
    weights = init_params(jax.random.key(0), decoder_spec(config), chosen)
    params = jax.tree.map(place_on_devices, weights, jax.tree.broadcast(placement, weights))
    return config, convert_weight_form(params, quantization, chosen, donate=True)


def read_param_shapes(path: Path, dtype: Any, quantization: str | None = None) -> Decoder:
    """Return the shapes of `read_model`'s parameters; no weight is read. Raises CheckpointError."""
    if not orbax.is_orbax(path):
        return shapes_from_specs(huggingface.read_hf_specs(path, dtype, quantization), jnp.dtype(dtype))
    shapes = shapes_from_specs(orbax.read_orbax_specs(path), jnp.dtype(dtype))
    return jax.eval_shape(lambda params: convert_weight_form(params, quantization, dtype), shapes)
