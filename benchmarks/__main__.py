"""The benchmarks' command line: measures duetto beside the peers that are installed, and writes what it
found.

python -m benchmarks                    # everything, the 135M shape
python -m benchmarks --quick            # a smoke run
python -m benchmarks decode throughput --engines duetto "llama.cpp bfloat16"
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import date
from importlib.util import find_spec
from pathlib import Path

from benchmarks.engines import OURS, OURS_FREE, OURS_NARROW, VARIANTS
from benchmarks.harness import QUICK, Amount, Bench, Row, installed
from benchmarks.models import cache, folder_for
from benchmarks.parts import alone, beside, scoring
from benchmarks.parts import short as short_prompts
from benchmarks.parts import tiers as page_tiers
from benchmarks.plot import plot
from benchmarks.report import HEAD, about, line, save
from benchmarks.traces import AZURE, MOONCAKE, Scale

HERE = Path(__file__).parent
PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "programs": alone.programs,
    "decode": beside.decode,
    "prefill": beside.prefill,
    "contract": beside.contract,
    "throughput": beside.throughput,
    "serving": beside.serving,
    "prefix": alone.prefix,
    "scoring": scoring.scoring,
    "padding": alone.padding,
    "growth": alone.growth,
    "short": short_prompts.short,
    "tiers": page_tiers.tiers,
}
DEMO = HERE.parent / "checkpoints" / "demo"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "python -m benchmarks", description="Measure duetto beside its peers.", allow_abbrev=False
    )
    p.add_argument("parts", nargs="*", metavar="PART", help=f"among {', '.join(PARTS)} (default: all)")
    p.add_argument("--model", default="135m", help="135m (default), 360m, 0.6b, 8b, demo, or a folder")
    p.add_argument("--quick", action="store_true", help="little of everything: to see whether it runs")
    p.add_argument("--engines", nargs="+", metavar="NAME", help=f"among {', '.join(map(repr, VARIANTS))}")
    p.add_argument("--no-peers", action="store_true", help="duetto alone")
    p.add_argument("--seats", type=int, default=32, help="requests that run at once (default: 32)")
    p.add_argument("--divisor", type=int, default=8, help="of a trace's lengths (default: 8, for a CPU)")
    p.add_argument("--prompt", type=int, default=1024, help="longest prompt (default: 1024)")
    p.add_argument("--output", type=int, default=128, help="longest output (default: 128)")
    p.add_argument(
        "--ttft", type=float, default=2.0, help="seconds that its p99 may take (default: 2, for a CPU)"
    )
    p.add_argument(
        "--tpot", type=float, default=0.2, help="the same of a further token (default: 0.2, for a CPU)"
    )
    p.add_argument("--rounds", type=int, help="rounds of turns (default: 5)")
    p.add_argument("--contexts", type=int, nargs="+", help="tokens before steps of decode (default: 128 512)")
    p.add_argument("--lengths", type=int, nargs="+", help="of prefills (default: 64 128 256 512)")
    p.add_argument("--runs", type=int, help="of a whole workload (default: 2)")
    p.add_argument("--minutes", type=float, help="of the long run in `growth` (default: 1)")
    p.add_argument("--azure", type=Path, default=AZURE, help="another trace for throughput and serving")
    p.add_argument("--mooncake", type=Path, default=MOONCAKE, help="another trace for prefixes")
    p.add_argument("--models", type=Path, default=cache(), help="where random weights are kept")
    p.add_argument("--out", type=Path, default=HERE / "results", help="folder of the results")
    return p


def bench_of(args: argparse.Namespace) -> Bench:
    """What the command line asks for. Raises ValueError for an engine that is unknown or not installed."""
    here, missing = installed()
    if args.no_peers:
        here, missing = [OURS, OURS_NARROW, OURS_FREE], []
    for name in args.engines or ():
        if name not in here:
            raise ValueError(f"engine {name!r} is unknown or not installed: {', '.join(map(repr, here))}")
    names = ("rounds", "contexts", "lengths", "runs", "minutes")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    folder = DEMO if args.model == "demo" else Path(args.model)
    bench = Bench(
        folder=folder if (folder / "config.json").exists() else folder_for(args.model, args.models),
        amount=replace(QUICK if args.quick else Amount(), **given),
        engines=args.engines or here,
        scale=Scale(args.divisor, args.prompt, args.output),
        seats=args.seats,
        ttft_limit=args.ttft,
        tpot_limit=args.tpot,
        azure=args.azure,
        mooncake=args.mooncake,
    )
    for package in missing if not args.engines else ():
        bench.note(f"{package} is not installed: its engines are left out")
    return bench


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and writes `<date>-<device>-<model>.json` and `.svg`."""
    args = parser().parse_args(argv)
    for part in args.parts:
        if part not in PARTS:
            print(f"part {part!r} is unknown: {', '.join(PARTS)}", file=sys.stderr)
            return 2
    try:
        bench = bench_of(args)
    except (ValueError, KeyError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    name, rows = Path(args.model).name, []
    facts = about(bench, name, date.today().isoformat())
    print(f"{name} on {facts['device']}: {facts['cpu']}, {facts['cores']} cores\n{HEAD}", flush=True)
    began = time.perf_counter()
    try:
        for part in args.parts or PARTS:
            rows += measured(part, bench)
    finally:
        bench.close()
        facts["seconds"] = round(time.perf_counter() - began)
        if rows:
            write(args, bench, facts, rows)
    return 0


def measured(part: str, bench: Bench) -> list[Row]:
    began, rows = time.perf_counter(), []
    for row in PARTS[part](bench):
        rows.append(row)
        print(line(row), flush=True)
    print(f"  ({part}: {time.perf_counter() - began:.0f} s)", flush=True)
    return rows


def write(args: argparse.Namespace, bench: Bench, facts: dict, rows: list[Row]) -> None:
    device = facts["device"].partition(" ")[0]
    file = args.out / f"{facts['date']}-{device}-{facts['model']}{'-quick' if args.quick else ''}.json"
    save(file, facts, bench.notes, rows)
    print(f"{file} ({facts['seconds']} s)")
    if find_spec("matplotlib"):
        plot(rows, f"{facts['model']} on {facts['cpu']}, {facts['date']}", file.with_suffix(".svg"))


if __name__ == "__main__":
    raise SystemExit(main())
