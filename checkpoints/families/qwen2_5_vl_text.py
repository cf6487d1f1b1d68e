"""Text models of Qwen2.5-VL (arXiv 2502.13923): those of Qwen2-VL by another name."""

from . import qwen2_vl_text

FAMILY = qwen2_vl_text.FAMILY
