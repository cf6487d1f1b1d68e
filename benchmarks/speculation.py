"""What guessing ahead brings: drafters, numbers of guesses and numbers of rows, each beside an engine that
does not guess.

    python benchmarks/speculation.py [--quick] [--json FILE] [--plot FILE] [--stories DIR]

Serves the demo model. Two engines take turns on the same prompts, and a speed-up is the median of the ratios
of such pairs. Theory is (1 - a^(k+1)) / ((1 - a) (c k + 1)) of Leviathan et al. (arXiv 2211.17192), with the
share a of judged guesses that were right and the cost c of drafting one token over that of a step, from the
times of compiled shapes. Prints markdown tables.
"""

import argparse
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax

from duetto import LLM, RequestOutput, SamplingParams
from duetto.serve.engine.speculation.drafter import make_host_drafter

ROOT = Path(__file__).resolve().parents[1]
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "draft model": {"method": "draft_model", "model": "demo-draft"},
    "heads": {"method": "heads", "model": "demo-heads"},
    "tree of heads": {"method": "tree", "model": "demo-heads"},
    "tree of draft": {"method": "tree", "model": "demo-draft"},
}
HOST = ("ngram", "suffix")  # their guesses cost the device nothing
TEMPERATURES = {"code": 0.0, "code, sampled": 0.7, "edit": 0.0, "summary": 0.0, "stories": 0.0}
SWEPT = ("ngram", "heads")


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    drafters: tuple[str, ...]
    ks: tuple[int, ...]
    loads: tuple[int, ...]
    pairs: int
    tokens: int


FULL = Plan(tuple(DRAFTERS), (1, 3, 5, 7), (1, 2, 4, 8), 3, 64)
QUICK = Plan(("ngram", "heads", "tree of heads"), (3,), (1, 8), 2, 32)


@dataclass(frozen=True)
class Cell:
    """One drafter with k guesses on one kind of text and a number of rows, which verifies every guess.

    `length` is the tokens that a pass with guesses gave, `per_pass` those of any pass, `accepted` the share
    of judged guesses that were right; `theory` is for one row.
    """

    text: str
    drafter: str
    k: int
    rows: int
    length: float
    per_pass: float
    accepted: float
    tokens_per_second: float
    speedup: float
    theory: float


@dataclass(frozen=True)
class Load:
    """A drafter at a number of rows: tokens a second of always and adaptively guessing over never, and of the
    latter over the better of the other two."""

    drafter: str
    rows: int
    always: float
    adaptive: float
    kept: float


# ---------------------------------------------------------------- texts


def prompts(rows: int) -> dict[str, list[str]]:
    """Prompts of each kind from Python source that the demo model has not read, one for each row.

    An edit is a piece of code whose beginning is written again; a summary is prose about which something is
    said again.
    """
    sys.path.insert(0, str(ROOT / "examples"))
    from demo_corpus import standard_library  # type: ignore[import-not-found]

    files = [t for t in standard_library().validation.values() if len(t) > 6000]
    pieces = [text[text.index("\ndef ", 1000) if "\ndef " in text[1000:] else 1000 :][:700] for text in files]
    lines = [piece.splitlines(keepends=True) for piece in pieces]
    edits = [f"# before\n{''.join(piece[:-1])}\n# after\n{''.join(piece[:3])}" for piece in lines]
    prose = [text[:700].rsplit(" ", 1)[0] for text in files]
    summaries = [f'{text}\n"""\n\n"""Summary: {" ".join(text.split()[:12])}' for text in prose]
    found = {"code": [t[2000:2600] for t in files], "edit": edits, "summary": summaries}
    found["code, sampled"] = found["code"]
    assert len(files) >= rows, f"{len(files)} files are too few for {rows} rows"
    return {kind: texts[:rows] for kind, texts in found.items()}


# ---------------------------------------------------------------- measuring


def serve(model: str | None, rows: int, config: dict[str, Any] | None = None) -> LLM:
    # what is timed is to be the same each time
    return LLM(
        model, max_num_seqs=rows, max_model_len=512, background_compilation=False, speculative_config=config
    )


def answers(llm: LLM, texts: Sequence[str], kind: str, tokens: int) -> tuple[list[RequestOutput], float]:
    """The continuations of all texts at once, and the seconds that they took."""
    params = SamplingParams(temperature=TEMPERATURES[kind], seed=0, max_tokens=tokens, ignore_eos=True)
    began = time.perf_counter()
    return llm.generate(list(texts), params, use_tqdm=False), time.perf_counter() - began


def policy(llm: LLM, controller: Any) -> Any:
    """Let a controller choose how many guesses are verified, or None: all. Returns the one before."""
    speculation: Any = llm.engine.speculation
    before, speculation.controller = speculation.controller, controller
    return before


def forget(llm: LLM) -> None:
    """Let a drafter that learns from finished outputs begin anew: the same prompts come again."""
    speculation: Any = llm.engine.speculation
    speculation.drafter = make_host_drafter(llm.options.speculation)


def step_seconds(times: Any, k: int) -> tuple[float, float]:
    """Seconds of the smallest step without guesses and with k, as the start-up measured them."""
    alone = min((size, t) for (size, n), t in times.items() if not n)[1]
    return alone, min(
        (n, size, t) for (size, n), t in times.items() if n >= min(k, max(n for _, n in times))
    )[2]


def cell(
    llms: tuple[LLM, LLM], what: tuple[str, str, int, float], groups: list[list[str]], plan: Plan
) -> Cell:
    """Serve each group of prompts in turns without and with guesses; `what` is the kind of text, the drafter,
    k and c."""
    (kind, drafter, k, c), ratios, seconds, tokens, passes = what, [], 0.0, 0, []
    for repeat in range(plan.pairs + 1):
        forget(llms[1])
        for group in groups:
            (plain, alone), (guessed, taken) = (answers(llm, group, kind, plan.tokens) for llm in llms)
            assert [o.outputs[0].token_ids for o in plain] == [o.outputs[0].token_ids for o in guessed]
            if repeat:  # the first is the warm-up
                ratios.append(alone / taken)
                seconds, tokens = seconds + taken, tokens + len(group) * plan.tokens
                passes += [p for o in guessed for p in (o.outputs[0].passes or [])[1:]]
    guessing = [p for p in passes if p.guesses]
    judged = sum(min(p.accepted + 1, len(p.guesses)) for p in guessing)
    a = sum(p.accepted for p in guessing) / max(judged, 1)
    depth = max((len(p.guesses) for p in guessing), default=0)
    length, per_pass = (sum(p.tokens for p in some) / max(len(some), 1) for some in (guessing, passes))
    theory = sum(a**i for i in range(depth + 1)) / (c * depth + 1)
    return Cell(
        kind,
        drafter,
        k,
        len(groups[0]),
        length,
        per_pass,
        a,
        tokens / seconds,
        statistics.median(ratios),
        theory,
    )


def cells(
    llms: tuple[LLM, LLM], what: tuple[str, int, float], texts: dict[str, list[str]], plan: Plan
) -> Iterator[Cell]:
    """A drafter's cells: code for every load, other texts for one row, of which edits and summaries are for
    the host's."""
    for kind, all_texts in texts.items():
        if kind in ("edit", "summary") and what[0] not in HOST:
            continue
        for rows in plan.loads if kind == "code" else plan.loads[:1]:
            groups = [[text] for text in all_texts[:4]] if rows == 1 else [all_texts[:rows]]
            yield cell(llms, (kind, *what), groups, plan)


def sweep(plain: LLM, llm: LLM, drafter: str, texts: list[str], plan: Plan) -> Iterator[Load]:
    """Always, never and adaptive in turns, for each load."""
    controller = policy(llm, None)
    for rows in plan.loads:
        found: list[tuple[float, float]] = []
        for repeat in range(3 * plan.pairs + 2):
            never, always, adaptive = (
                (
                    policy(one, chosen) if one is llm else None,
                    answers(one, texts[:rows], "code", plan.tokens)[1],
                )[1]
                for one, chosen in ((plain, None), (llm, None), (llm, controller))
            )
            if repeat > 1:
                found.append((never / always, never / adaptive))
        always, adaptive = (statistics.median(x) for x in zip(*found, strict=True))
        yield Load(drafter, rows, always, adaptive, adaptive / max(always, 1.0))


def measure(model: str | None, texts: dict[str, list[str]], plan: Plan) -> tuple[list[Cell], list[Load]]:
    """All cells and the sweep of a model, printed as they are measured. The first drafter's guesses must cost
    the device nothing."""
    rows, found, swept, base = max(plan.loads), [], [], {}
    with serve(model, rows) as plain:
        for drafter, k in itertools.product(plan.drafters, plan.ks):
            with serve(model, rows, DRAFTERS[drafter] | {"num_speculative_tokens": k}) as llm:
                controller = policy(llm, None)
                alone, verified = step_seconds(controller.call_seconds, k)
                c = max(0.0, verified - base.setdefault(k, verified if drafter in HOST else alone)) / (
                    k * alone
                )
                for one in cells((plain, llm), (drafter, k, 0.0 if drafter in HOST else c), texts, plan):
                    found.append(one)
                    print(line(one), flush=True)
                policy(llm, controller)
                if drafter in SWEPT and k == 3 and "code" in texts:
                    swept += sweep(plain, llm, drafter, texts["code"], plan)
    return found, swept


# ---------------------------------------------------------------- the command


HEADER = (
    "| text | drafter | k | rows | acceptance length | tokens a pass | guesses right | tokens/s | speed-up "
    "| theory |\n|---|---|---|---|---|---|---|---|---|---|"
)


def line(c: Cell) -> str:
    return (
        f"| {c.text} | {c.drafter} | {c.k} | {c.rows} | {c.length:.2f} | {c.per_pass:.2f} | {c.accepted:.0%} "
        f"| {c.tokens_per_second:.0f} | {c.speedup:.2f} | {c.theory:.2f} |"
    )


def draw(found: list[Cell], swept: list[Load], file: Path) -> None:
    """Speed-up by k for one row, theory dotted; and by rows for the policies."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "duetto", "font.size": 9}
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    one = [c for c in found if c.text == "code" and c.rows == 1]
    for i, drafter in enumerate(dict.fromkeys(c.drafter for c in one)):
        mine = [c for c in one if c.drafter == drafter]
        left.plot([c.k for c in mine], [c.speedup for c in mine], "o-", color=f"C{i}", label=drafter)
        left.plot([c.k for c in mine], [c.theory for c in mine], ":", color=f"C{i}")
    left.set(xlabel="guesses", title="speed-up, one row (dotted: theory)")
    for i, drafter in enumerate(dict.fromkeys(x.drafter for x in swept)):
        mine = [x for x in swept if x.drafter == drafter]
        right.plot(
            [x.rows for x in mine],
            [x.adaptive for x in mine],
            "o-",
            color=f"C{i}",
            label=f"{drafter}, adaptive",
        )
        right.plot(
            [x.rows for x in mine], [x.always for x in mine], "s--", color=f"C{i}", label=f"{drafter}, always"
        )
    right.set(xlabel="rows", title="speed-up, three guesses")
    for axis in (left, right):
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(file, metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few cells only")
    parser.add_argument(
        "--stories", metavar="DIR", help="measure a model in this folder too: n-grams, on stories"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture (SVG)")
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, help="default: all")
    parser.add_argument("--guesses", nargs="+", type=int, metavar="K", help="default: 1 3 5 7")
    parser.add_argument("--rows", nargs="+", type=int, metavar="N", help="default: 1 2 4 8")
    options = parser.parse_args(arguments)
    given = {"drafters": options.drafters, "ks": options.guesses, "loads": options.rows}
    plan = replace(QUICK if options.quick else FULL, **{k: tuple(v) for k, v in given.items() if v})
    versions = f"jax {jax.__version__}, Python {platform.python_version()}"
    about = f"demo model with dtype auto, {versions}, {time.strftime('%Y-%m-%d')}"
    print(f"{about}\n\n{HEADER}")
    found, swept = measure(None, prompts(max(plan.loads)), plan)
    if options.stories:
        own = Plan(HOST, plan.ks, plan.loads[:1], plan.pairs, plan.tokens)
        found += measure(options.stories, {"stories": ["Once upon a time, there was a little girl"]}, own)[0]
    print(
        "\n| drafter | rows | always | adaptive | adaptive over the better of always and never |\n"
        "|---|---|---|---|---|"
    )
    for x in swept:
        print(f"| {x.drafter} | {x.rows} | {x.always:.2f} | {x.adaptive:.2f} | {x.kept:.2f} |")
    if options.json:
        record = {"about": about, "cells": [asdict(c) for c in found], "loads": [asdict(x) for x in swept]}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.plot:
        draw(found, swept, options.plot)


if __name__ == "__main__":
    main()
