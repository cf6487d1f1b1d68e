"""Kimi K2 (arXiv 2507.20534): DeepSeek-V3 with other sizes and one group of experts.

Absent fields have the defaults of the class beside the models on the hub, which are DeepSeek-V3's;
transformers reads such folders as `deepseek_v3`.
"""

from . import deepseek_v3

FAMILY = deepseek_v3.FAMILY
