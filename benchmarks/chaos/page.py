"""Write the counts of a run into the table of docs/reliability.md:

python -m benchmarks.chaos.page benchmarks/results/2026-11-26-chaos.json
"""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
ROW = re.compile(r"^(\| [^|]*?\((`\w+`(?:, `\w+`)*)\) \|.*\|) [\w,]+ \|$", re.MULTILINE)


def filled(page: str, run: Mapping[str, Any]) -> str:
    """Return a page whose rows have the number of times that their faults struck in a run."""

    def row(found: re.Match[str]) -> str:
        count = sum(run["faults"].get(kind, 0) for kind in re.findall(r"\w+", found[2]))
        return f"{found[1]} {count:,} |"

    seeds = sum(run["seeds"].values())
    return re.sub(r"a run of [\d,]+ seeds", f"a run of {seeds:,} seeds", ROW.sub(row, page))


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), json.loads(Path(sys.argv[1]).read_text())))
