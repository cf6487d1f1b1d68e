"""What n-grams bring by the number of rows: the adaptive engine and fixed numbers of guesses over none.

    python benchmarks/studies/speculation_sweep.py --rows 1 2 4 --json FILE
    python benchmarks/studies/speculation_sweep.py --read FILE... --plot FILE

Serves the demo model with as many seats as rows. Policies take turns on the same prompts, pieces of 200 to
900 characters of Python files that the model has not read; a figure is the median of the ratios of such
turns. Tokens are compared with those of the engine that does not guess. Prints a markdown table.
"""

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from duetto import LLM, SamplingParams
from duetto.serve.speculation.acceptance import Offer

ROOT = Path(__file__).resolve().parents[2]
K, PROMPTS, TOKENS = 7, 96, 64
FIXED = (1, 3, 7)


@dataclass(frozen=True)
class Row:
    """Tokens a second over those without guesses, for each policy in each round."""

    rows: int
    ratios: dict[str, list[float]]

    def median(self, policy: str) -> float:
        return statistics.median(self.ratios[policy])

    @property
    def best(self) -> str:
        return max((policy for policy in self.ratios if policy != "adaptive"), key=self.median)

    @property
    def kept(self) -> float:
        """The adaptive engine over the best fixed number of guesses, none among them, round by round."""
        fixed = self.ratios[self.best]
        if self.median(self.best) < 1:
            fixed = [1.0] * len(fixed)
        pairs = zip(self.ratios["adaptive"], fixed, strict=True)
        return statistics.median(a / b for a, b in pairs)


class Fixed:
    """A controller that verifies at most k guesses of every row in every step."""

    def __init__(self, k: int):
        self.k = k

    def asks(self, rows: int) -> bool:
        return True

    def choose(self, offers: Sequence[Offer]) -> list[int]:
        return [min(self.k, offer.guesses) for offer in offers]

    def verified(self, guesses: Sequence[int], tokens: int, seconds: float | None) -> None: ...
    def plainly(self, rows: int, seconds: float) -> None: ...
    def judged(self, form: int, offered: int, accepted: int) -> None: ...
    def glance(self, rows: int, offers: Sequence[Offer]) -> None: ...


def texts(count: int) -> list[str]:
    sys.path.insert(0, str(ROOT / "examples"))
    from demo_corpus import standard_library  # type: ignore[import-not-found]

    chosen = random.Random(0)
    files = [text for text in standard_library().validation.values() if len(text) > 3000]
    lengths = [chosen.randint(200, 900) for _ in range(count)]
    places = [chosen.randint(0, 2000) for _ in range(count)]
    return [files[i % len(files)][at : at + n] for i, (at, n) in enumerate(zip(places, lengths, strict=True))]


def serve(rows: int, config: dict[str, Any] | None = None) -> LLM:
    # what is timed is to be the same each time
    return LLM(
        None, max_num_seqs=rows, max_model_len=1024, serve_while_compiling=False, speculative_config=config
    )


def answers(llm: LLM, prompts: list[str]) -> tuple[list[list[int]], float]:
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    began = time.perf_counter()
    found = llm.generate(prompts, params, use_tqdm=False)
    return [one.outputs[0].token_ids for one in found], time.perf_counter() - began


def measure(rows: int, rounds: int) -> Row:
    """Every policy in turn, each round beginning with another."""
    prompts = texts(min(PROMPTS, 16 * rows))
    ratios: dict[str, list[float]] = {}
    with serve(rows) as plain, serve(rows, {"method": "ngram", "num_speculative_tokens": K}) as llm:
        speculation: Any = llm.engine.speculation
        policies = {f"k = {k}": Fixed(k) for k in FIXED} | {"adaptive": speculation.controller}
        want, _ = answers(plain, prompts)
        for turn in range(rounds + 1):
            seconds: dict[str, float] = {}
            names = [*policies, "none"]
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                speculation.controller = policies.get(name)
                found, seconds[name] = answers(plain if name == "none" else llm, prompts)
                assert found == want, f"{name} gives other tokens"
            for name in policies if turn else ():  # the first is the warm-up
                ratios.setdefault(name, []).append(seconds["none"] / seconds[name])
    return Row(rows, ratios)


HEADER = (
    f"| rows | {' | '.join(f'k = {k}' for k in FIXED)} | adaptive | range | over the best fixed |\n"
    f"|---|{'---|' * len(FIXED)}---|---|---|"
)


def line(row: Row) -> str:
    fixed = " | ".join(f"{row.median(f'k = {k}'):.2f}" for k in FIXED)
    own = row.ratios["adaptive"]
    spread = f"{min(own):.2f} to {max(own):.2f}"
    return f"| {row.rows} | {fixed} | {row.median('adaptive'):.3f} | {spread} | {row.kept:.3f} |"


def draw(found: list[Row], file: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "duetto", "font.size": 9}
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 3.4), layout="constrained")
    for i, policy in enumerate(found[0].ratios):
        style = "o-" if policy == "adaptive" else "s--"
        medians = [row.median(policy) for row in found]
        axis.plot([row.rows for row in found], medians, style, color=f"C{i}", label=policy)
    axis.axhline(1, color="grey", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_xticks([row.rows for row in found], [str(row.rows) for row in found])
    axis.set(xlabel="rows", title="n-grams: tokens a second over none")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    figure.savefig(file, metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32], metavar="N")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every policy; 5 without it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--read", nargs="+", type=Path, metavar="FILE", help="show figures of earlier runs")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture (SVG)")
    options = parser.parse_args(arguments)
    about = f"demo model with dtype auto, jax {jax.__version__}, Python {platform.python_version()}"
    print(f"{about}, {time.strftime('%Y-%m-%d')}\n\n{HEADER}", flush=True)
    found: list[Row] = []
    if options.read:
        records = [row for file in options.read for row in json.loads(file.read_text())["rows"]]
        found = sorted((Row(**record) for record in records), key=lambda row: row.rows)
        print("\n".join(map(line, found)))
    for rows in () if options.read else options.rows:
        found.append(measure(rows, options.rounds))
        print(line(found[-1]), flush=True)
        if options.json:
            record = {"about": about, "rows": [asdict(row) for row in found]}
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.plot:
        draw(found, options.plot)


if __name__ == "__main__":
    main()
