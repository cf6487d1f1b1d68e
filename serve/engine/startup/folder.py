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
from ....checkpoints.folders import copy_description, nested_in
from ....checkpoints.generation import GenerationDefaults, generation_defaults
from ....checkpoints.huggingface import read_config
from ....checkpoints.tensors import CheckpointError
from ....model.config import ModelConfig
from ....model.sharding import place_at
from ....model.transformer import Decoder, decoder_spec
from ....model.tree import abstract, init
from ....model.weights.compress import in_form
from ....model.weights.prepared import fuse_qkv, laid_out
from ....sampling.params import MAX_STOP_IDS, SamplingParams
from ...host import progress
from ...host.devices import default_device, memory_limit
from ...options.engine import EngineOptions
from ...runtime.multihost.rendezvous import agree_on
from .cpu_kernels import build_kernels
from .dtype import check_cache, dtype_name, shared_dtype
from .mesh import layout_of, places
from .stages import with_head

DEFAULT = EngineOptions()
DEMO = Path(checkpoints.__file__).parent / "demo"


def load_folder(
    path: Path,
    dtype: Any,
    mesh: Mesh | None = None,
    options: EngineOptions = DEFAULT,
) -> tuple[ModelConfig, Decoder, GenerationDefaults]:
    """A model folder's configuration, parameters and generation defaults, split over a mesh, or as the
    options say, by `model.sharding`'s rules.

    With the load format "dummy" no weights are read: they are random.

    Raises CheckpointError for the folder, ValueError for sizes that are no multiple of the mesh's, and where
    processes of a group have other files.
    """
    defaults = checked_defaults(path)
    device = default_device() if mesh is None else mesh.devices.flat[0]
    options.on(memory_limit(device)).check_stages(options.stations)
    check_cache(options, device)
    build_kernels(options, device.platform)
    config = read_config(path)
    where = places(config, layout_of(options), mesh) or device
    is_random = options.load_format == "dummy"
    read = random_folder if is_random else read_folder
    chosen = shared_dtype(dtype, device, config, None if is_random else path, options.cpu_kernels)
    if dtype_name(dtype) == "auto" and chosen in (jnp.bfloat16, jnp.float16):
        progress.say(f"computing in {chosen}, which this processor multiplies faster; the choice is dtype's")
    agree_on(path)
    config, params = read(path, chosen, where, options.quantization)
    params = with_head(params)
    return config, read_in_form(params, options), defaults


def read_in_form(params: Decoder, options: EngineOptions) -> Decoder:
    """Parameters that were read for an engine, as their device multiplies them. Those that are copied are
    deleted."""
    params = laid_out(params, bool(options.cpu_kernels), donate=True, tied_head=options.tied_head)
    return fuse_qkv(params, donate=True) if options.fuses_qkv else params


def checked_defaults(path: Path) -> GenerationDefaults:
    """A folder's generation defaults, within the sampler's limits. Raises CheckpointError with the file and
    the field."""
    found, file = generation_defaults(path), path / "generation_config.json"
    try:
        SamplingParams.from_dict(found.sampling)
    except (ValueError, TypeError, OverflowError) as e:
        raise CheckpointError(f"{file}: {e}".replace("max_tokens", "max_new_tokens")) from e
    count = len(set(found.eos_token_ids))
    if count > MAX_STOP_IDS:
        raise CheckpointError(f"{path}: eos_token_id has {count} ids, expected at most {MAX_STOP_IDS}")
    return found


def read_folder(
    path: Path, dtype: Any, where: Any, quantization: str | None = None
) -> tuple[ModelConfig, Decoder]:
    """The model in a Hugging Face folder, or in one that `duetto convert` has written, on a device or in
    shardings."""
    where = SingleDeviceSharding(where) if isinstance(where, jax.Device) else where
    if not orbax.is_orbax(path):
        track = partial(progress.over, what="reading weights", patience=progress.PATIENCE)
        loaded = huggingface.load(path, dtype, where, quantization=quantization, track=track)
        if (kind := nested_in(path)) is not None:
            progress.say(f"of a folder of {kind} the text's model is read; what reads images is not")
        return loaded
    config, params = orbax.load(path, dtype, where)
    return config, in_form(params, quantization, params.embed.dtype, donate=True)


def write_orbax(folder: Path, source: Path, params: Decoder) -> None:
    """Write parameters and what describes their model into a fresh folder: `orbax.save`. `source` is the
    folder that the model was read from; how it stores weights is left out."""
    copy_description(source, folder)
    raw = json.loads((folder / "config.json").read_bytes())
    if raw.pop("quantization_config", None) is not None:
        (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    orbax.save(folder, params)


def random_folder(
    path: Path, dtype: Any, where: Any, quantization: str | None = None
) -> tuple[ModelConfig, Decoder]:
    """The model of a folder's `config.json` with random weights, the same at each start; "auto" is
    bfloat16."""
    where = SingleDeviceSharding(where) if isinstance(where, jax.Device) else where
    config = read_config(path)
    chosen = jnp.dtype("bfloat16" if dtype == "auto" else dtype)
    drawn = init(jax.random.key(0), decoder_spec(config), chosen)
    params = jax.tree.map(place_at, drawn, jax.tree.broadcast(where, drawn))
    return config, in_form(params, quantization, chosen, donate=True)


def read_shapes(path: Path, dtype: Any, quantization: str | None = None) -> Decoder:
    """Return the shapes of `read_folder`'s parameters; no weight is read. Raises CheckpointError."""
    if not orbax.is_orbax(path):
        return abstract(huggingface.read_specs(path, dtype, quantization), jnp.dtype(dtype))
    shapes = abstract(orbax.read_specs(path), jnp.dtype(dtype))
    return jax.eval_shape(lambda params: in_form(params, quantization, dtype), shapes)
