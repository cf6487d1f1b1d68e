"""Configurations of a program's matrix products, by which shapes fall into classes of equal bits on a GPU.

A sum's bits follow from how it is cut: into parts of the inner dimension that are added afterwards (split-K),
and into tiles. Without the device there is no autotuning, so a GPU that is here may choose otherwise. The
classes that serve are found by comparing bits (`serve/runtime/equal_bits/classes.py`).
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ...runtime.compiled.tuning import noted
from .hlo import Instruction, Module, sizes_of

FUSED = re.compile(r"gemm|dot")  # in the kind of a fusion that some backend compiles as one product
LIBRARY = re.compile(r'custom_call_target="(__cublas\$[^"]*|__cudnn\$[^"]*)"')
# a kernel of `model/weights`: its tiles stand in the name of what it computes, and whether
# its columns are x's rows
KERNEL = re.compile(
    r'custom_call_target="(mosaic_gpu\w*|__gpu\$xla\.gpu\.triton)".*?op_name="[^"]*/(turned_)?(tiles_\w+)/'
)


class Product(NamedTuple):
    """A matrix product: its columns, the parts that its inner dimension is cut into, who computes it, and
    how."""

    columns: int
    parts: int
    kind: str
    config: str


def products(module: Module) -> tuple[Product, ...]:
    """The products that a program runs, in the order of its text."""
    return tuple(found for x in module.written() if (found := product(x)))


def product(x: Instruction) -> Product | None:
    """Return the product that an instruction computes, or None."""
    if kernel := KERNEL.search(x.rest):
        *parts, rows, columns = sizes_of(x.kind)
        return Product(rows if kernel[2] else columns, parts[0] if parts else 1, kernel[1], kernel[3])
    library = LIBRARY.search(x.rest)
    if not library and x.operation != "fusion":
        return None
    config = noted(x.rest)
    own = config.get("fusion_backend_config", config)
    kind = library[1] if library else own.get("kind", "")
    if not library and not FUSED.search(kind):
        return None
    *parts, _, columns = sizes_of(x.kind)
    settings = {name: value for name, value in own.items() if name != "kind"}
    return Product(columns, parts[0] if parts else 1, kind, json.dumps(settings, sort_keys=True))


def alike(programs: Mapping[str, Iterable[Product]], vocabulary: int) -> list[list[str]]:
    """Names of programs whose layers' products are configured alike, largest group first.

    Products with the vocabulary's columns are left out: a prefill makes logits of its last tokens only.
    """
    groups: dict[tuple[Product, ...], list[str]] = {}
    for name, found in programs.items():
        groups.setdefault(tuple(p for p in found if p.columns != vocabulary), []).append(name)
    return sorted(groups.values(), key=len, reverse=True)
