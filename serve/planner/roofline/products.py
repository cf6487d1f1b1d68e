"""Configurations of a program's matrix products, by which shapes fall into classes of equal bits on a GPU.

A sum's bits follow from how it is cut: into parts of the inner dimension that are added afterwards (split-K),
and into tiles. Without the device there is no autotuning, so a GPU that is here may choose otherwise. The
classes that serve are found by comparing bits (`serve/runtime/equal_bits/classes.py`).
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ...runtime.compiled.tuning import parse_backend_config
from .hlo import Instruction, Module, type_shape

PRODUCT_FUSION = re.compile(r"gemm|dot")  # kind of a fusion that a backend compiles as one product
LIBRARY_CALL = re.compile(r'custom_call_target="(__cublas\$[^"]*|__cudnn\$[^"]*)"')
# A kernel of `model/weights` names its tiles in its scope; `transposed_` if its columns are x's rows.
KERNEL_CALL = re.compile(
    r'custom_call_target="(mosaic_gpu\w*|__gpu\$xla\.gpu\.triton)".*?op_name="[^"]*/(transposed_)?(tiles_\w+)/'
)


class Product(NamedTuple):
    """A matrix product as XLA configured it.

    columns: of the result.
    parts: number of parts that the inner dimension is cut into (split-K).
    kind: library or kernel that computes it.
    config: its settings, as JSON.
    """

    columns: int
    parts: int
    kind: str
    config: str


def find_products(module: Module) -> tuple[Product, ...]:
    """Return the products that a program runs, in the order of its text."""
    return tuple(product for x in module.buffer_instructions() if (product := parse_product(x)))


def parse_product(x: Instruction) -> Product | None:
    """Return the product that an instruction computes, or None."""
    if kernel := KERNEL_CALL.search(x.attribute_text):
        *parts, rows, columns = type_shape(x.type_text)
        return Product(rows if kernel[2] else columns, parts[0] if parts else 1, kernel[1], kernel[3])
    library = LIBRARY_CALL.search(x.attribute_text)
    if not library and x.operation != "fusion":
        return None
    config = parse_backend_config(x.attribute_text)
    backend_config = config.get("fusion_backend_config", config)
    kind = library[1] if library else backend_config.get("kind", "")
    if not library and not PRODUCT_FUSION.search(kind):
        return None
    *parts, _, columns = type_shape(x.type_text)
    settings = {name: value for name, value in backend_config.items() if name != "kind"}
    return Product(columns, parts[0] if parts else 1, kind, json.dumps(settings, sort_keys=True))


def group_by_products(programs: Mapping[str, Iterable[Product]], vocabulary: int) -> list[list[str]]:
    """Group the names of programs whose layers' products are configured alike, the largest group first.

    Products with the vocabulary's columns are skipped: a prefill computes logits of its last tokens only.
    """
    groups: dict[tuple[Product, ...], list[str]] = {}
    for name, products in programs.items():
        groups.setdefault(tuple(p for p in products if p.columns != vocabulary), []).append(name)
    return sorted(groups.values(), key=len, reverse=True)
