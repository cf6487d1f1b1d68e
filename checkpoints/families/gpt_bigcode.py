"""StarCoder and SantaCoder (Li et al., arXiv 2305.06161; Ben Allal et al., arXiv 2301.03988): GPT-2 with one
head of keys and values, and matrices stored (out, in)."""

from ...model.config import ModelConfig
from . import fields, gpt2
from .family import Family
from .storage import Stored

QKV = gpt2.LAYER + "attn.c_attn."
NAMES = gpt2.NAMES | {
    "layers.{}.attention.q": Stored(QKV + "weight", "K[NH],D->DNH"),
    "layers.{}.attention.k": Stored(QKV + "weight", "K[H],D->DKH"),
    "layers.{}.attention.v": Stored(QKV + "weight", "K[H],D->DKH"),
    "layers.{}.attention.q_bias": Stored(QKV + "bias", "K[NH]->NH"),
    "layers.{}.attention.k_bias": Stored(QKV + "bias", "K[H]->KH"),
    "layers.{}.attention.v_bias": Stored(QKV + "bias", "K[H]->KH"),
    "layers.{}.attention.o": Stored(gpt2.LAYER + "attn.c_proj.weight", "D,NH->NHD"),
    "layers.{}.ffn.up": Stored(gpt2.LAYER + "mlp.c_fc.weight", "F,D->DF"),
    "layers.{}.ffn.down": Stored(gpt2.LAYER + "mlp.c_proj.weight", "D,F->FD"),
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' GPTBigCodeConfig."""
    kv_heads = 1 if fields.flag(raw, "multi_query", True) else None
    return gpt2.model_config(raw, "gelu_pytorch_tanh", kv_heads)


FAMILY = Family(parse_config, NAMES, (gpt2.MASKS,))
