"""Mamba-2 (Dao and Gu, arXiv 2405.21060), as Codestral Mamba: state spaces without attention, and without
feed-forward layers."""

from typing import Any

from ...model.config import LayerKind, ModelConfig, NormKind
from ...model.recurrent.kinds import Mamba
from ...refusals import shown
from . import fields, parts
from .family import Family
from .stored import Stored

LAYER = "backbone.layers.{}."
INFINITE = {"__float__": "Infinity"}  # as transformers 5 writes it
LONGEST = 131072  # where no field says what the longest context is: the model has none


def names(mixer: str) -> dict[str, Stored]:
    """Where the tensors of a mixer are."""
    inner = {"z": "KV", "v": "KV", "k": "KH", "q": "KH", "step": "KG"}  # in their order in one tensor
    found = {x: Stored(mixer + "in_proj.weight", f"[{of}],D->D{of}") for x, of in inner.items()}
    found |= {f"{x}_bias": Stored(mixer + "in_proj.bias", f"[{of}]->{of}") for x, of in inner.items()}
    for x in ("v", "k", "q"):
        found[f"{x}_conv"] = Stored(mixer + "conv1d.weight", f"[{inner[x]}],1,Z->{inner[x]}Z")
        found[f"{x}_conv_bias"] = Stored(mixer + "conv1d.bias", f"[{inner[x]}]->{inner[x]}")
    found |= {
        "step_offset": Stored(mixer + "dt_bias", "KG->KG"),
        "decay_log": Stored(mixer + "A_log", "KG->KG"),
        "skip": Stored(mixer + "D", "KG->KG"),
        "norm": Stored(mixer + "norm.weight", "KV->KV"),
        "o": Stored(mixer + "out_proj.weight", "D,KV->KVD"),
        "o_bias": Stored(mixer + "out_proj.bias", "D->D"),
    }
    return {f"layers.{{}}.recurrent.{path}": stored for path, stored in found.items()}


NAMES = names(LAYER + "mixer.") | {
    "embed": Stored("backbone.embeddings.weight", "V,D->VD"),
    "norm.gain": Stored("backbone.norm_f.weight", "D->D"),
    "head": Stored("lm_head.weight", "V,D->VD"),
    "layers.{}.attention_norm.gain": Stored(LAYER + "norm.weight", "D->D"),
}


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' Mamba2Config."""
    fields.only(raw, "rms_norm", True)
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
    return parts.decoder(raw, LayerKind(mixer, None), max_position=LONGEST, norm=norm)


def beside_attention(raw: fields.Raw, width: int, **kinds: Any) -> Mamba:
    """The mixer of a family that has attention as well, of `width` inner dimensions, by fields that begin
    with `mamba_`."""
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
            "eps": parts.rms(raw).eps,
        }
        | kinds,
    )


def mixer_sizes(raw: fields.Raw, width: int, heads: int, groups: int, size: int) -> dict[str, Any]:
    """Sizes of a mixer of `width` inner dimensions, and the limits of its steps."""
    fields.only(raw, "hidden_act", "silu", "swish")
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
    """`time_step_limit`, the smallest and the largest step; the latter may be infinite."""
    found: Any = fields.value(raw, "time_step_limit", [0.0, float("inf")])
    if isinstance(found, list) and len(found) == 2:
        low, high = (float("inf") if x == INFINITE else x for x in found)
        if all(type(x) in (int, float) for x in (low, high)) and 0 <= low <= high and low < float("inf"):
            return float(low), float(high)
    raise ValueError(
        f"time_step_limit is {shown(found)}, expected two numbers, the first 0 or more and at most the second"
    )


FAMILY = Family(config, NAMES, prefix="backbone.")
