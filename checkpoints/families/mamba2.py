"""Mamba-2 (Dao and Gu, arXiv 2405.21060), as Codestral Mamba: state spaces without attention, and without
feed-forward layers."""

from typing import Any

from ...model.config import LayerKind, ModelConfig, NormKind
from ...model.recurrent.kinds import Mamba
from ...refusals import quote
from . import fields, parts
from .family import Family
from .storage import Stored

LAYER = "backbone.layers.{}."
INFINITE = {"__float__": "Infinity"}  # as transformers 5 writes it
MAX_POSITION = 131072  # tokens; the model has no longest context, and no field states one


def mixer_names(mixer: str) -> dict[str, Stored]:
    """Return the storage of a mixer's parameters; `mixer` is the prefix of its tensors."""
    inner = {"z": "KV", "v": "KV", "k": "KH", "q": "KH", "step": "KG"}  # in the tensor's order
    stored_names = {x: Stored(mixer + "in_proj.weight", f"[{of}],D->D{of}") for x, of in inner.items()}
    stored_names |= {f"{x}_bias": Stored(mixer + "in_proj.bias", f"[{of}]->{of}") for x, of in inner.items()}
    for x in ("v", "k", "q"):
        stored_names[f"{x}_conv"] = Stored(mixer + "conv1d.weight", f"[{inner[x]}],1,Z->{inner[x]}Z")
        stored_names[f"{x}_conv_bias"] = Stored(mixer + "conv1d.bias", f"[{inner[x]}]->{inner[x]}")
    stored_names |= {
        "step_offset": Stored(mixer + "dt_bias", "KG->KG"),
        "decay_log": Stored(mixer + "A_log", "KG->KG"),
        "skip": Stored(mixer + "D", "KG->KG"),
        "norm": Stored(mixer + "norm.weight", "KV->KV"),
        "o": Stored(mixer + "out_proj.weight", "D,KV->KVD"),
        "o_bias": Stored(mixer + "out_proj.bias", "D->D"),
    }
    return {f"layers.{{}}.recurrent.{path}": stored for path, stored in stored_names.items()}


NAMES = mixer_names(LAYER + "mixer.") | {
    "embed": Stored("backbone.embeddings.weight", "V,D->VD"),
    "norm.gain": Stored("backbone.norm_f.weight", "D->D"),
    "head": Stored("lm_head.weight", "V,D->VD"),
    "layers.{}.attention_norm.gain": Stored(LAYER + "norm.weight", "D->D"),
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' Mamba2Config."""
    fields.allow_only(raw, "rms_norm", True)
    norm = NormKind(eps=fields.number(raw, "layer_norm_epsilon", 1e-5))
    bias = fields.flag(raw, "use_bias", False)
    sizes = mixer_sizes(
        raw,
        fields.integer(raw, "expand", 2) * fields.integer(raw, "hidden_size"),
        heads=fields.integer(raw, "num_heads", 128),
        groups=fields.integer(raw, "n_groups", 8),
        size=fields.integer(raw, "head_dim", 64),
    )
    mixer = Mamba(
        **sizes,
        key_size=fields.integer(raw, "state_size", 128),
        kernel=fields.integer(raw, "conv_kernel", 4),
        conv_bias=fields.flag(raw, "use_conv_bias", True),
        bias=bias,
        output_bias=bias,
        eps=norm.eps,
    )
    return parts.model_config(raw, LayerKind(mixer, None), max_position=MAX_POSITION, norm=norm)


def hybrid_mixer_config(raw: fields.Raw, width: int, **kinds: Any) -> Mamba:
    """Return the mixer of a family with attention, of `width` inner dimensions. Its fields begin with
    `mamba_`."""
    heads, bias = fields.integer(raw, "mamba_n_heads", 128), fields.flag(raw, "mamba_proj_bias", False)
    auto = width // heads if raw.get("mamba_d_head") == "auto" else None
    return Mamba(
        **mixer_sizes(
            raw,
            width,
            heads=heads,
            groups=fields.integer(raw, "mamba_n_groups", 1),
            size=auto or fields.integer(raw, "mamba_d_head", width // heads),
        ),
        **{
            "key_size": fields.integer(raw, "mamba_d_state", 256),
            "kernel": fields.integer(raw, "mamba_d_conv", 4),
            "conv_bias": fields.flag(raw, "mamba_conv_bias", True),
            "bias": bias,
            "output_bias": bias,
            "eps": parts.rms_norm_config(raw).eps,
        }
        | kinds,
    )


def mixer_sizes(raw: fields.Raw, width: int, heads: int, groups: int, size: int) -> dict[str, Any]:
    """Return the sizes of a mixer of `width` inner dimensions, and the limits of its time steps."""
    fields.allow_only(raw, "hidden_act", "silu", "swish")
    if heads * size != width:
        raise ValueError(f"{heads} heads of {size} are not the {width} inner dimensions of Mamba-2")
    if heads % groups:
        raise ValueError(f"{heads} heads of Mamba-2 are not a multiple of {groups} groups")
    return {
        "key_heads": groups,
        "num_heads": heads,
        "value_size": size,
        "step_limits": step_limits(raw),
    }


def step_limits(raw: fields.Raw) -> tuple[float, float]:
    """Return `time_step_limit`: the smallest and the largest time step, which may be infinite."""
    limit: Any = fields.value(raw, "time_step_limit", [0.0, float("inf")])
    if isinstance(limit, list) and len(limit) == 2:
        low, high = (float("inf") if x == INFINITE else x for x in limit)
        if all(type(x) in (int, float) for x in (low, high)) and 0 <= low <= high and low < float("inf"):
            return float(low), float(high)
    raise ValueError(
        f"time_step_limit is {quote(limit)}, expected two numbers, the first 0 or more and at most the second"
    )


FAMILY = Family(parse_config, NAMES)
