"""Shapes are said and checked: the suite runs with annotations checked, and none of an array lacks its
letters."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError
from suite.fixtures import CHECKED, ROOT

from duetto.kvcache.pages import query_key_products
from duetto.model.attention import group_queries

ARRAYS = {"Array", "ndarray"}
LETTER = re.compile(r"(?<![A-Za-z_])([A-Za-z])(?![A-Za-z_])")
WEIGHTS = "a weight has the axes that its equation says"
EXCEPTIONS = {  # by function, why there are no letters
    **dict.fromkeys(
        (
            "tree.find_non_finite",
            "tree.is_all_finite",
            "layers.Weight.einsum",
            "layers.JointWeight.joint_einsum",
            "layers.einsum",
            "layers.einsums",
            "layers.plain_einsum",
            "layers.einsum_one_row",
            "layers.einsum_16bit",
            "layers.einsum_16bit.multiply_on_cpu",
            "layers.is_single_row",
            "lowrank.LowRank.einsum",
            "lora.Adapted.einsum",
            "lowrank.factorise_weight",
            "quant.Quantised.einsum",
            "input_quantised.InputQuantised.einsum",
            "input_quantised.quantise_rows",
            "layers.MappingWeight.mapped_einsum",
            "layers.mapped_einsum",
            "code_tiles.run_assembly",
            "code_tiles.RowFunction",
            "ffn.activation",
            "transposed_codes.TransposedCodes.einsum",
            "transposed_codes.TransposedCodes.joint_einsum",
            "transposed_codes.TransposedCodes.mapped_einsum",
            "transposed_codes.multiply_coded_rows",
            "transposed_codes.return_row",
            "input_quantised.multiply_codes",
            "input_quantised.scale_code_sums",
            "input_quantised.sum_code_products",
            "input_quantised.sum_code_products.multiply",
            "input_quantised.sum_code_products.multiply_widened",
            "quant.has_zero_scale",
            "quant.has_codes_of_scale_zero",
            "quant.Quantised.dequantise",
            "quant.Quantised.signed_codes",
            "quant.align_scales",
            "schemes.spread_blocks",
            "nibbles.unpack_nibbles",
            "nibbles.pack_nibbles",
            "quant.quantise_weight",
            "schemes.compute_group_scales",
            "fixed_tiles.FixedTiled.einsum",
            "transposed.Transposed.einsum",
            "panels.Packed.einsum",
            "panels.Packed.joint_einsum",
            "panels.multiply_panels",
            "fixed_tiles.multiply_fixed_rows",
            "fixed_tiles.choose_fixed_kernel",
            "quant.multiply_on_mesh",
            "quant.multiply_on_mesh.multiply_split",
            "input_quantised.sum_scaled_groups",
            "input_quantised.add_scaled_groups",
            "quant.Quantised.has_nibble_kernel",
            "quant.partition_scaled_product.multiply_local",
            "quant.scaled_product",
            "quant.einsum_by_kernel",
            "quant.einsum_by_xla",
            "compress.encode_weight",
            "compress.dequantise_weight",
            "tree.init_params.draw",
        ),
        WEIGHTS,
    ),
    "layers.apply_gain": "a gain has the last axes of what it scales",
    "layers.add_bias": "a bias has the last axes of what it is added to",
    "attention.KernelInput": "it stands where shapes are said, in the place of Array",
    "cpu_attention.CpuInput": "it stands where shapes are said, in the place of Array",
}


def files() -> list[Path]:
    folders = [ROOT.joinpath(*name.split(".")) for name in CHECKED]
    return [path for folder in folders for path in sorted(folder.rglob("*.py"))]


def annotations(node: ast.AST, name: str) -> Iterator[tuple[str, ast.expr]]:
    """Every annotation of a function's signature in a file, nested functions' too, under the function's
    name."""
    for child in ast.iter_child_nodes(node):
        inner = f"{name}.{child.name}" if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else name
        if isinstance(child, ast.FunctionDef):
            given = child.args
            args = (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
            yield from ((inner, arg.annotation) for arg in args if arg and arg.annotation)
            yield from [(inner, child.returns)] if child.returns else []
        yield from annotations(child, inner)


def aliases(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """What a file's own names for types stand for."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def shapes(annotation: ast.AST) -> Iterator[str | None]:
    """The shape of each array of an annotation, None of one without."""
    if isinstance(annotation, ast.Subscript) and isinstance(annotation.slice, ast.Tuple):
        parts = annotation.slice.elts
        if isinstance(parts[-1], ast.Constant) and isinstance(parts[-1].value, str):
            yield parts[-1].value
            return
    if (
        annotation.attr if isinstance(annotation, ast.Attribute) else getattr(annotation, "id", "")
    ) in ARRAYS:
        yield None
    for child in ast.iter_child_nodes(annotation):
        yield from shapes(child)


def arrays() -> list[tuple[str, str | None]]:
    """Every array of a signature by its function, and its shape."""
    pairs = []
    for path in files():
        tree = ast.parse(path.read_text())
        said = [*annotations(tree, path.stem), *((f"{path.stem}.{name}", x) for name, x in aliases(tree))]
        pairs += [(name, shape) for name, x in said for shape in shapes(x)]
    return pairs


def test_a_wrong_shape_is_refused():
    with pytest.raises(TypeCheckError, match="group_queries"):
        group_queries(jnp.zeros((1, 2, 3)), 1)
    with pytest.raises(TypeCheckError, match="products"):
        query_key_products(jnp.zeros((2, 1, 4, 8)), jnp.zeros((2, 3, 4, 8)))


def test_every_array_annotation_has_a_shape():
    bare = {name for name, shape in arrays() if shape in (None, "...")}
    assert bare == set(EXCEPTIONS)


def test_shape_letters_are_those_of_the_docs():
    told = (ROOT / "docs" / "architecture.md").read_text().partition("## Notation\n")[2].partition("\n## ")[0]
    known = set(re.findall(r"\| (\w) (?=\|)", told))
    used = {letter for _, shape in arrays() for letter in LETTER.findall(shape or "")}
    assert used <= known, f"{used - known} are not in docs/architecture.md"
