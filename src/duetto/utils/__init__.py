"""Modules under the names that they have in vLLM."""

from .argparse_utils import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
