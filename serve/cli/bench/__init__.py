"""`duetto bench`: times of this machine's programs and of its host."""

from .programs import Bench, BenchModel, add_flags, group_seconds, measure, median_seconds, prefills, run

__all__ = [
    "Bench",
    "BenchModel",
    "add_flags",
    "group_seconds",
    "measure",
    "median_seconds",
    "prefills",
    "run",
]
