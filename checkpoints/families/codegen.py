"""CodeGen (Nijkamp et al., arXiv 2203.13474): GPT-J whose queries, values and keys are joined in each of four
blocks, one for each device of its training."""

from ...model.config import ModelConfig
from . import fields, gptj
from .family import Family
from .storage import Stored

QKV = gptj.LAYER + "attn.qkv_proj.weight"
BLOCKS = 4
NAMES = gptj.OTHERS | {
    "layers.{}.attention.q": Stored(QKV, f"{BLOCKS}[NH],D->DNH"),
    "layers.{}.attention.v": Stored(QKV, f"{BLOCKS}[KH],D->DKH"),
    "layers.{}.attention.k": Stored(QKV, f"{BLOCKS}[KH],D->DKH"),
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' CodeGenConfig:
    GPT-J's."""
    name = fields.present_name(raw, "num_attention_heads", "n_head")
    if (heads := fields.integer(raw, name, 16)) % BLOCKS:
        raise ValueError(f"{name} is {heads}, expected a multiple of {BLOCKS}")
    return gptj.parse_config(raw)


FAMILY = Family(parse_config, NAMES, (gptj.MASKS,))
