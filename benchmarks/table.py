"""Markdown tables from runs' JSON files, printed, or put into documents between their marks.

    python -m benchmarks.table benchmarks/results/*-cpu-135m.json [--into README.md docs/results.md]

Of several runs each table is of the last one that has its part. A document says which table it wants, and
where: `<!-- benchmarks: decode -->` ... `<!-- end -->`. The names are those of the parts, `summary`, and
`machine`.
"""

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.engines import OURS, OURS_NARROW
from benchmarks.harness import Row
from benchmarks.report import Result, load

MARKS = re.compile(r"(<!-- benchmarks: ([\w ]+?) -->\n).*?(<!-- end -->)", re.DOTALL)
SUMMARY = {
    "throughput": (0,),
    "decode": (0, -1),
    "prefill": (-1,),
}  # which figures of a part, by their places


def table(rows: Sequence[Row]) -> str:
    """A line for each figure, a column for each engine: the median, and how many times as fast duetto was in
    the same rounds."""
    engines = list(dict.fromkeys(row.engine for row in rows))
    units = {row.what: row.unit for row in rows}
    found = {(row.what, row.engine): cell(row) for row in rows}
    lines = [f"| | unit | {' | '.join(engines)} |", "|---" * (len(engines) + 2) + "|"]
    for what, unit in units.items():
        cells = " | ".join(found.get((what, engine), "") for engine in engines)
        lines.append(f"| {what} | {unit} | {cells} |")
    return "\n".join(lines)


def cell(row: Row) -> str:
    others = {} if row.engine == OURS else row.faster
    ratio = others.get(reference(row), next(iter(others.values()), None))
    median = f"{row.median:.3g}" if row.median < 1000 else f"{row.median:.0f}"
    return median if ratio is None else f"{median} ({ratio:.2f} x)"


def reference(row: Row) -> str:
    """The engine of ours that another is compared with: the one of its dtype."""
    narrow = row.engine.endswith("bfloat16") and OURS_NARROW in row.faster
    return OURS_NARROW if narrow else OURS


def machine(result: Result) -> str:
    """Where the figures were taken, in a paragraph."""
    a = result.about
    versions = ", ".join(f"{name} {text}" for name, text in a["versions"].items())
    amount = a["amount"]
    return (
        f"{a['date']}, model `{a['model']}` (random weights) on {a['device']}: {a['cpu']}, "
        f"{a['cores']} cores, {a['memory_gib']} GiB; Python {a['python']}, {versions}. "
        f"Medians of {amount['rounds']} rounds ({amount['runs']} of whole workloads) in which the "
        "engines take turns; in brackets how many times as fast duetto was (in bfloat16 beside bfloat16, "
        f"else in float32), the median over the rounds. Traces: {a['scale']}; {a['seats']} seats."
    )


def parts(result: Result) -> list[str]:
    return list(dict.fromkeys(row.part for row in result.rows))


def machines(results: Sequence[Result]) -> str:
    """The machine of the last run, and what is of earlier ones."""
    *earlier, last = results
    later, also = set(parts(last)), []
    for result in reversed(earlier):
        own = [part for part in parts(result) if part not in later]
        later |= set(own)
        also += [f" Of a run of {result.about['date']}: {', '.join(own)}."] if own else []
    return machine(last) + "".join(also)


def block(results: Sequence[Result], name: str) -> str:
    """The text of a name. Raises ValueError where no run has anything under it."""
    if name == "machine":
        return machines(results)
    for result in reversed(results):
        rows = summary(result) if name == "summary" else [row for row in result.rows if row.part == name]
        if rows:
            return table(rows)
    raise ValueError(f"benchmarks: {name}: no run has such a part")


def summary(result: Result) -> list[Row]:
    """A few figures of the main parts, of the engines that have all of them."""
    chosen: list[tuple[str, str]] = []
    for part, places in SUMMARY.items():
        figures = dict.fromkeys(row.what for row in result.rows if row.part == part and row.unit != "%")
        chosen += [(part, list(figures)[place]) for place in places if figures]
    rows = [row for figure in chosen for row in result.rows if (row.part, row.what) == figure]
    counts = Counter(row.engine for row in rows)
    return [row for row in rows if counts[row.engine] == len(chosen)]


def fill(text: str, results: Sequence[Result]) -> str:
    """A document with the tables that it asks for. Raises ValueError."""
    return MARKS.sub(lambda found: f"{found[1]}{block(results, found[2])}\n{found[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.table", description="Markdown tables of runs.")
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT", help="JSON file of a run")
    parser.add_argument(
        "--into", type=Path, nargs="+", default=[], metavar="FILE", help="documents with marks"
    )
    args = parser.parse_args()
    results = [load(file) for file in args.results]
    for document in args.into:
        document.write_text(fill(document.read_text(), results))
    if not args.into:
        every = dict.fromkeys(part for result in results for part in parts(result))
        print("\n\n".join([machines(results), *(f"## {part}\n\n{block(results, part)}" for part in every)]))


if __name__ == "__main__":
    main()
