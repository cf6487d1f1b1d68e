"""What n-grams bring by the number of rows: the adaptive engine and fixed numbers of guesses over none.

    python benchmarks/studies/speculation_sweep.py --rows 1 2 4 --json FILE
    python benchmarks/studies/speculation_sweep.py --read FILE... --plot FILE
    python benchmarks/studies/speculation_sweep.py --mixed 7 4 --rows 8 32

Serves the demo model with as many seats as rows. Policies take turns on the same prompts, pieces of 200 to
900 characters of Python files that the model has not read; a figure is the median of the ratios of such
turns. Tokens are compared with those of the engine that does not guess. Prints a markdown table.

`--mixed` compares adaptive engines of so many guesses on 120 requests of which a third is greedy, a third is
drawn at temperature 0.7 and a third at 1.0 with top_p 0.95, and which take 64 to 128 tokens. Engines are made
anew in each round and serve in turns of a quarter of a second, over the mean of two that do not guess: what
one of these is over both shows the noise of the machine.
"""

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax

from duetto import LLM, SamplingParams
from duetto.serve.engine.speculation.acceptance import Offer

ROOT = Path(__file__).resolve().parents[2]
K, PROMPTS, TOKENS = 7, 96, 64
FIXED = (1, 3, 7)
MIXED = 120  # requests of the mixed workload
PIECE = 0.25  # seconds of an engine's turn on it


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

    def should_speculate(self, rows: int) -> bool:
        return True

    def choose_draft_counts(self, offers: Sequence[Offer]) -> list[int]:
        return [min(self.k, offer.num_draft_tokens) for offer in offers]

    def record_speculative(
        self, draft_counts: Sequence[int], tokens: int, seconds: float, has_prompts: bool
    ) -> None: ...
    def record_plain(self, rows: int, seconds: float) -> None: ...
    def record_acceptance(self, streak_class: int, offered: int, accepted: int) -> None: ...
    def learn_shadow_offers(self, rows: int, offers: Sequence[Offer]) -> None: ...


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
        None, max_num_seqs=rows, max_model_len=1024, background_compilation=False, speculative_config=config
    )


def greedy(count: int) -> list[SamplingParams]:
    return [SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)] * count


def mixed(count: int) -> list[SamplingParams]:
    """Greedy and seeded sampling in turns, of various lengths."""
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_p": 0.95},
    )
    chosen = random.Random(1)
    return [
        SamplingParams(**kinds[i % len(kinds)], seed=i, max_tokens=chosen.randint(TOKENS, 2 * TOKENS))
        for i in range(count)
    ]


Work = tuple[list[str], list[SamplingParams]]  # prompts, and how their answers are sampled


def answers(llm: LLM, work: Work) -> tuple[list[list[int]], float]:
    began = time.perf_counter()
    found = llm.generate(*work, use_tqdm=False)
    return [one.outputs[0].token_ids for one in found], time.perf_counter() - began


def compare(policies: dict[str, tuple[LLM, Any]], work: Work, rounds: int) -> dict[str, list[float]]:
    """Tokens a second over those of the policy `none`, each round beginning with another. A policy is an
    engine, and the controller that it takes for its turn."""
    ratios: dict[str, list[float]] = {}
    want, _ = answers(policies["none"][0], work)
    names = list(policies)
    for turn in range(rounds + 1):
        seconds: dict[str, float] = {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            llm, controller = policies[name]
            if (speculation := cast(Any, llm.engine.speculation)) is not None:
                speculation.controller = controller
            found, seconds[name] = answers(llm, work)
            assert found == want, f"{name} gives other tokens"
        for name in names if turn else ():  # the first is the warm-up
            ratios.setdefault(name, []).append(seconds["none"] / seconds[name])
    del ratios["none"]
    return ratios


def guessing(rows: int, k: int) -> LLM:
    return serve(rows, {"method": "ngram", "num_speculative_tokens": k})


def controller_of(llm: LLM) -> Any:
    return cast(Any, llm.engine.speculation).controller


def measure(rows: int, rounds: int) -> Row:
    """Fixed numbers of guesses and the adaptive engine."""
    prompts = texts(min(PROMPTS, 16 * rows))
    with serve(rows) as plain, guessing(rows, K) as llm:
        fixed = {f"k = {k}": (llm, Fixed(k)) for k in FIXED}
        policies = fixed | {"adaptive": (llm, controller_of(llm)), "none": (plain, None)}
        return Row(rows, compare(policies, (prompts, greedy(len(prompts))), rounds))


def measure_mixed(rows: int, rounds: int, ks: Sequence[int]) -> Row:
    """The adaptive engine with at most k guesses for several k, on the mixed workload, over the mean of two
    engines that do not guess.

    Each round makes new engines, another one first: the place of an engine's memory is worth some per cent.
    """
    makers = {f"adaptive, k = {k}": partial(guessing, rows, k) for k in ks}
    makers |= dict.fromkeys(("none", "none again"), partial(serve, rows))
    ratios: dict[str, list[float]] = {name: [] for name in makers if name != "none"}
    work = (texts(MIXED), mixed(MIXED))
    for turn in range(rounds):
        names = [*makers][turn % len(makers) :] + [*makers][: turn % len(makers)]
        with ExitStack() as engines:
            served = {name: engines.enter_context(makers[name]()) for name in names}
            in_turns(served, work)  # the first is the warm-up
            seconds = in_turns(served, work)
        plain = (seconds["none"] + seconds["none again"]) / 2
        for name, own in ratios.items():
            own.append(plain / seconds[name])
    return Row(rows, ratios)


def in_turns(served: dict[str, LLM], work: Work) -> dict[str, float]:
    """The seconds of each engine for the same requests, in turns of PIECE seconds: what slows the machine
    slows them all."""
    seconds, found = dict.fromkeys(served, 0.0), {name: {} for name in served}
    for llm in served.values():
        for i, (prompt, params) in enumerate(zip(*work, strict=True)):
            llm.add_request(prompt, params, str(i))
    while unfinished := [name for name, llm in served.items() if llm.has_unfinished_requests()]:
        for name in unfinished:
            llm, began = served[name], time.perf_counter()
            while llm.has_unfinished_requests() and time.perf_counter() - began < PIECE:
                found[name] |= {one.request_id: one.outputs[0].token_ids for one in llm.step()}
            seconds[name] += time.perf_counter() - began
    for name, own in found.items():
        assert own == found["none"], f"{name} gives other tokens"
    return seconds


HEADER = (
    f"| rows | {' | '.join(f'k = {k}' for k in FIXED)} | adaptive | range | over the best fixed |\n"
    f"|---|{'---|' * len(FIXED)}---|---|---|"
)


def line(row: Row) -> str:
    fixed = " | ".join(f"{row.median(f'k = {k}'):.2f}" for k in FIXED)
    own = row.ratios["adaptive"]
    spread = f"{min(own):.2f} to {max(own):.2f}"
    return f"| {row.rows} | {fixed} | {row.median('adaptive'):.3f} | {spread} | {row.kept:.3f} |"


def line_mixed(row: Row) -> str:
    cells = (f"{row.median(name):.3f} ({min(own):.2f} to {max(own):.2f})" for name, own in row.ratios.items())
    return f"| {row.rows} | {' | '.join(cells)} |"


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
    parser.add_argument("--mixed", nargs="+", type=int, metavar="K", help="the mixed workload instead")
    options = parser.parse_args(arguments)
    about = f"demo model with dtype auto, jax {jax.__version__}, Python {platform.python_version()}"
    head, show, one = HEADER, line, measure
    if options.mixed:
        names = [f"adaptive, k = {k}" for k in options.mixed] + ["none again"]
        head = f"| rows | {' | '.join(names)} |\n|---|{'---|' * len(names)}"
        show, one = line_mixed, partial(measure_mixed, ks=options.mixed)
    print(f"{about}, {time.strftime('%Y-%m-%d')}\n\n{head}", flush=True)
    found: list[Row] = []
    if options.read:
        records = [row for file in options.read for row in json.loads(file.read_text())["rows"]]
        found = sorted((Row(**record) for record in records), key=lambda row: row.rows)
        print("\n".join(map(show, found)))
    for rows in () if options.read else options.rows:
        found.append(one(rows, options.rounds))
        print(show(found[-1]), flush=True)
        if options.json:
            record = {"about": about, "rows": [asdict(row) for row in found]}
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.plot:
        draw(found, options.plot)


if __name__ == "__main__":
    main()
