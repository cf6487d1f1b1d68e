"""`duetto bench`: times of this machine's programs and of its host."""

from .programs import (
    Bench,
    BenchModel,
    add_flags,
    count_prefills,
    group_seconds,
    measure_shape,
    median_seconds,
    run,
)

__all__ = [
    "Bench",
    "BenchModel",
    "add_flags",
    "count_prefills",
    "group_seconds",
    "measure_shape",
    "median_seconds",
    "run",
]
