"""From a folder, or from parameters at hand, to a warm engine."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from ... import checkpoints
from ...checkpoints import huggingface, orbax
from ...checkpoints.generation import GenerationDefaults, generation_defaults
from ...checkpoints.huggingface import read_config
from ...checkpoints.tensors import CheckpointError
from ...model.compress import in_form
from ...model.config import ModelConfig
from ...model.pair import PairConfig
from ...model.sharding import shardings
from ...model.transformer import Decoder, decoder_spec
from ...model.tree import abstract, init, paths
from ...sampling.params import MAX_STOP_IDS, SamplingParams
from ..engine.engine import Engine
from ..engine.guessing import Speculation
from ..engine.scheduler import Limits
from ..host import progress, store
from ..host.devices import default_device, memory_limit
from ..host.memory import keep_freed
from ..options.engine import EngineOptions
from ..programs import jaxcache
from ..programs.classes import Classes, choose_classes, step_seconds
from ..programs.compile import Arguments, Programs
from ..programs.shapes import can_share, least_row, table
from ..programs.sizing import choose_sizes
from ..speculation.beside import read_beside
from ..speculation.drafter import host_drafter

DEMO = Path(checkpoints.__file__).parent / "demo"
DTYPES = ("auto", "float32", "bfloat16", "float16")
SHORT_NAMES = {"half": "float16", "float": "float32"}


def cache_home() -> Path:
    """Where compiled programs are kept: `duetto/xla` in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "duetto" / "xla"


def keep_compiled(folder: str | Path | None = "auto") -> None:
    """Let jax keep compiled programs on disk, so that the second start of a model does not compile; None
    changes nothing.

    With "auto" a directory that the user gave to jax stays as it is. In one that others own or can write to,
    nothing is kept, and a warning says so.
    """
    if folder is None or (folder == "auto" and jax.config.values["jax_compilation_cache_dir"]):
        return
    try:
        chosen = str(cache_home() if folder == "auto" else folder)
    except RuntimeError as error:  # the user has no home
        return store.warn(f"compiled programs are not kept: {error}")
    local = "://" not in chosen
    if local and not store.usable(Path(chosen)):
        return
    if local:
        jaxcache.bound(Path(chosen))
    if jax.config.values["jax_compilation_cache_dir"] != chosen:
        compilation_cache.reset_cache()  # else jax stays with the folder that it opened first
    jax.config.update("jax_compilation_cache_dir", chosen)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if local:
        jaxcache.check(Path(chosen))


def dtype_name(dtype: Any) -> str:
    """One of DTYPES, from its name (vLLM's "half" and "float" too), numpy's, jax's or torch's dtype. Raises
    ValueError.
    """
    if isinstance(dtype, str) or str(dtype).startswith("torch."):
        name = str(dtype).removeprefix("torch.")
    else:
        try:
            name = jnp.dtype(dtype).name
        except TypeError:
            name = ""
    name = SHORT_NAMES.get(name, name)
    if name not in DTYPES:
        raise ValueError(f'dtype {dtype!r} is not allowed: "auto", "float32", "bfloat16" or "float16"')
    return name


def compute_dtype(dtype: Any, device: Any) -> Any:
    """The dtype to load weights in. "auto" is the checkpoint's own, but float32 on CPUs: few have
    instructions for 16-bit products."""
    name = dtype_name(dtype)
    if name == "auto":
        return "float32" if device.platform == "cpu" else "auto"
    return jnp.dtype(name)


def load_folder(
    path: Path,
    dtype: Any,
    mesh: Mesh | None = None,
    quantization: str | None = None,
    load_format: str = "auto",
) -> tuple[ModelConfig, Decoder, GenerationDefaults]:
    """A model folder's configuration, parameters and generation defaults, split over a mesh by
    `model.sharding`'s rules.

    With the load format "dummy" no weights are read: they are random.

    Raises CheckpointError for the folder, ValueError for sizes that are no multiple of the mesh's.
    """
    defaults = checked_defaults(path)
    device = default_device() if mesh is None else mesh.devices.flat[0]
    # with axes of automatic type, as `jax.make_mesh` does not make them
    plain = mesh and Mesh(mesh.devices, mesh.axis_names)
    where = shardings(decoder_spec(read_config(path)), plain) if plain else device
    read = random_folder if load_format == "dummy" else read_folder
    config, params = read(path, compute_dtype(dtype, device), where, quantization)
    return config, params, defaults


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
        told = partial(progress.over, what="reading weights", patience=progress.PATIENCE)
        return huggingface.load(path, dtype, where, quantization=quantization, told=told)
    config, params = orbax.load(path, dtype, where)
    return config, in_form(params, quantization, params.embed.dtype, donate=True)


def random_folder(
    path: Path, dtype: Any, where: Any, quantization: str | None = None
) -> tuple[ModelConfig, Decoder]:
    """The model of a folder's `config.json` with random weights, the same at each start; "auto" is
    bfloat16."""
    where = SingleDeviceSharding(where) if isinstance(where, jax.Device) else where
    config = read_config(path)
    chosen = jnp.dtype("bfloat16" if dtype == "auto" else dtype)
    params = jax.device_put(init(jax.random.key(0), decoder_spec(config), chosen), where)
    return config, in_form(params, quantization, chosen, donate=True)


def read_shapes(path: Path, dtype: Any, quantization: str | None = None) -> Decoder:
    """What `read_folder` gives, without numbers; no weight is read. Raises CheckpointError."""
    if not orbax.is_orbax(path):
        return abstract(huggingface.read_specs(path, dtype, quantization), jnp.dtype(dtype))
    shapes = abstract(orbax.read_specs(path), jnp.dtype(dtype))
    return jax.eval_shape(lambda params: in_form(params, quantization, dtype), shapes)


def start_engine(config: ModelConfig, params: Decoder, options: EngineOptions) -> Engine:
    """Size, compile and warm up an engine for parameters that are on their device. Raises TypeError for
    others."""
    with progress.telling(options.use_tqdm_on_load):
        engine = warm_engine(config, params, options)
    jaxcache.seal()
    return engine


def warm_engine(config: ModelConfig, params: Decoder, options: EngineOptions) -> Engine:
    require_arrays(params)
    options.require_unstored("these are parameters")
    params = in_form(params, options.quantization, params.embed.dtype)
    device = next(iter(params.embed.devices()))
    if device.platform == "cpu":
        keep_freed()
    beside = read_beside(options.speculation, config, params)
    pair, everything = PairConfig(config, beside.config), beside.join(params)
    sizes = choose_sizes(pair, options, everything, memory_limit(device))
    sizes = replace(sizes, hidden=config.hidden_size if beside.is_head else 0)
    shapes = table(options, sizes, can_share(pair.layers))
    phases = beside.phases(pair.within(sizes.max_model_len), options.speculation)
    programs = Programs(phases, everything, sizes, shapes)
    classes, state = choose_classes(programs, programs.empty(everything), options.reproducible)
    speculation, state = start_speculation(programs, classes, state, options)
    limits = Limits(
        max_num_seqs=sizes.max_num_seqs,
        max_prefill_tokens=options.max_prefill_tokens,
        row=least_row(classes.prefill),
        decode_steps=max(s.tokens for s in classes.decode),
        guesses=options.guesses,
    )
    return Engine(programs, classes, state, limits, options.enable_prefix_caching, speculation)


def start_speculation(
    programs: Programs, classes: Classes, state: Arguments, options: EngineOptions
) -> tuple[Speculation | None, Arguments]:
    """The drafter and, where the number of guesses adapts, the time of every shape; None without guesses.

    Raises ValueError where verification cannot keep the reproducibility contract.
    """
    config, k = options.speculation, options.guesses
    if not k:
        return None, state
    if not classes.verify:
        raise ValueError(
            "speculative_config: on this device no verification gives the bits of decode: set reproducible=False"
        )
    k, seconds = min(k, max(s.tokens for s in classes.verify) - 1), None
    if config.adaptive:
        seconds, state = step_seconds(programs, state, classes, k)
    return Speculation(host_drafter(config), k, seconds), state


def require_arrays(params: Decoder) -> None:
    """Raise TypeError unless every parameter is on a device: others would be copied there in every step.

    Raises ValueError for one that lies on other devices than the embedding, and on several without saying
    how.
    """
    if not isinstance(params, Decoder) or params.embed is None:
        raise TypeError(f"parameters are a Decoder, not {type(params).__name__}")
    for path, leaf in paths(params).items():
        if not isinstance(leaf, jax.Array):
            raise TypeError(
                f"parameter {path} is a {type(leaf).__name__}, expected a jax.Array: use jax.device_put"
            )
    expected = params.embed.sharding.device_set
    for path, leaf in paths(params).items():
        own, found = leaf.sharding, leaf.sharding.device_set
        if found != expected:
            raise ValueError(
                f"parameter {path} lies on {named(found)}, embed on {named(expected)}: all must lie on the same devices"
            )
        if len(found) > 1 and not isinstance(own, NamedSharding):
            raise ValueError(f"parameter {path} has a {type(own).__name__}, expected a NamedSharding")
        if not leaf.is_fully_addressable:
            raise ValueError(
                f"parameter {path} lies on other processes' devices too, expected this one's only"
            )


def named(devices: set[Any]) -> str:
    return " and ".join(sorted(map(str, devices)))
