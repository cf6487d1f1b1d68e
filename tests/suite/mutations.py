"""Mutants of a source file: one small change each, such as a bug that a review overlooks."""

import ast
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.MatMult: ast.Add, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd,
}  # fmt: skip
FIXED_NODES = (ast.Import, ast.ImportFrom, ast.Raise, ast.Assert, ast.JoinedStr, ast.arg)
FIXED_FIELDS = ("annotation", "returns", "decorator_list", "bases")


@dataclass(frozen=True)
class Mutant:
    """One change of a file: `text` in place of the bytes from `start` to `end`, which begin in `line`."""

    file: str
    line: int
    start: int
    end: int
    text: str
    operator: str

    @property
    def key(self) -> str:
        return f"{self.file}:{self.line}:{self.start}:{self.operator}"

    def apply(self, source: bytes) -> bytes:
        """Return the source with the change."""
        return source[: self.start] + self.text.encode() + source[self.end :]


def find_mutants(root: Path, file: Path) -> Iterator[Mutant]:
    """Yield all mutants of a file below the root."""
    source = file.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in walk(ast.parse(source)):
        for target, text, operator in mutations_of(node):
            start, end = (
                starts[x - 1] + y
                for x, y in [(target.lineno, target.col_offset), (target.end_lineno, target.end_col_offset)]
            )
            yield Mutant(file.relative_to(root).as_posix(), target.lineno, start, end, text, operator)


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that may change, without annotations, decorators, docstrings, messages and imports."""
    yield node
    for name, part in ast.iter_fields(node):
        for child in part if isinstance(part, list) else [part]:
            is_docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            is_fixed = name in FIXED_FIELDS or is_docstring or isinstance(child, FIXED_NODES)
            if isinstance(child, ast.AST) and not is_fixed:
                yield from walk(child)


def mutations_of(node: Any) -> Iterator[tuple[Any, str, str]]:
    """Yield the changes of a node: the node to replace, its text, and the kind of change."""
    match node:
        case ast.Compare(left, [first, *others], sides):
            yield node, text_of(ast.Compare(left, [COMPARISONS[type(first)](), *others], sides)), "comparison"
        case ast.BinOp(ast.Constant(str()), _, _) | ast.BinOp(_, _, ast.Constant(str())):
            return
        case ast.BinOp(left, operator, right):
            yield node, text_of(ast.BinOp(left, ARITHMETIC[type(operator)](), right)), "arithmetic"
        case ast.BoolOp(operator, sides):
            yield (
                node,
                text_of(ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), sides)),
                "and, or",
            )
        case ast.Constant(bool(value)):
            yield node, str(not value), "constant"
        case ast.Constant(int(value) | float(value)):
            yield node, f"({value + 1!r})", "constant"
        case ast.Call(function, [first, second, *others], named) if ast.dump(first) != ast.dump(second):
            if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
                yield node, text_of(ast.Call(function, [second, first, *others], named)), "swapped arguments"
        case ast.If(test) | ast.While(test) | ast.IfExp(test):
            yield test, text_of(ast.UnaryOp(ast.Not(), test)), "negated condition"
        case ast.Expr(ast.Call() | ast.Await()) | ast.AugAssign():
            yield node, "pass", "dropped statement"
        case ast.Return(ast.expr() as value) if not isinstance(value, ast.Constant):
            yield node, "return None", "early return"


def text_of(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"


def draw_mutants(
    mutants: Sequence[Mutant], folder_of: Callable[[str], str], count: int, seed: int
) -> list[Mutant]:
    """Draw `count` mutants: folders by their shares, in a folder operators in turn, at most one a line."""
    rng, folders = random.Random(seed), dict[str, list[Mutant]]()
    for mutant in mutants:
        folders.setdefault(folder_of(mutant.file), []).append(mutant)
    shares = {name: max(1, round(count * len(group) / len(mutants))) for name, group in folders.items()}
    drawn = [x for name in sorted(folders) for x in draw_from_folder(folders[name], shares[name], rng)]
    return rng.sample(drawn, len(drawn))


def draw_from_folder(mutants: Sequence[Mutant], count: int, rng: random.Random) -> Iterator[Mutant]:
    """Draw `count` mutants of a folder: each time one of the operator that was drawn least."""
    remaining, lines, counts = rng.sample(mutants, len(mutants)), set[tuple[str, int]](), Counter[str]()
    while remaining and counts.total() < count:
        mutant = min(remaining, key=lambda x: counts[x.operator])
        remaining.remove(mutant)
        if (mutant.file, mutant.line) not in lines:
            lines.add((mutant.file, mutant.line))
            counts[mutant.operator] += 1
            yield mutant
