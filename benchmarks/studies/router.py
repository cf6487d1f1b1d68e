"""Prompts that find their beginnings: a router that knows pages against one that deals in turn.

    python benchmarks/studies/router.py --output FILE
    python benchmarks/studies/router.py --real
    python benchmarks/studies/router.py --naming checkpoints/demo

The Mooncake trace goes to replicas that compute nothing and keep real books: the engine's pools, page tables
and names, in a time of their own, in which a prompt takes so many seconds for each token that is not found,
one prompt after the other, and each generated token one step, all together. The router's own code chooses.
Times to the first token are those of such replicas, and say what finding prompts is worth.

With --real: conversations of the trace, shortened, on two `duetto serve` of the shipped model whose caches
hold 1,536 tokens each; their own metrics say what was found.

With --naming: what a prompt costs the router, by its text and by its tokens, and what asking a replica's
/tokenize would cost.
"""

import argparse
import asyncio
import heapq
import itertools
import json
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.studies.server import started
from benchmarks.traces import BLOCK, MOONCAKE, Request, conversations, read, with_prefixes
from duetto.kvcache.page_hash import extend, root
from duetto.kvcache.tables import PageTables
from duetto.serve.kv.events import KVEventBatch, Translator
from duetto.serve.kv.routing.placement import ROW, Prompt, Replica, RoutedRequest, best
from duetto.serve.kv.routing.prefix_index import AssumedPrefixIndex, EventPrefixIndex
from duetto.serve.options.router import RouterOptions
from duetto.serve.options.server import ServerOptions
from duetto.serve.server.router.events import ReplicaPages
from duetto.serve.server.router.health import Health
from duetto.serve.server.router.main import app, replicas_of
from duetto.serve.server.router.prompts import TOKENS, TextNaming, TokenNaming, named
from duetto.serve.server.router.proxy import Proxy
from duetto.serve.server.router.queue import PrefillPool, RequestQueue

DIVISOR, PAGE = 8, 16  # lengths of the trace are divided, so that 64 tokens stand for a block of 512
ROOT = root("simulated")
SEATS = 64
SHORT = 64  # lengths of the trace are divided by so much for real servers
SERVER = [
    "-m", "duetto", "serve", "--port", "0", "--quiet", "--max-num-seqs", "4", "--max-model-len", "384",
    "--page-size", "8", "--max-batched-token-mem", "1536", "--max-prefill-delay", "0",
]  # fmt: skip
READ, WRITE = 1 / 1000, 0.02  # seconds: a token of a prompt, a step (an 8B model on an H100, over DIVISOR)


class Books:
    """A replica that computes nothing: its pages, and when it would have computed what."""

    def __init__(self, pages: int, memory: AssumedPrefixIndex | EventPrefixIndex):
        self.tables, self.memory = PageTables([None], [pages], PAGE, work=512), memory
        self.replica = Replica("simulated", memory, ROW // DIVISOR)
        self.replica.is_ready = True
        self.line: deque[Any] = deque()
        self.free_at, self.seated, self.found, self.asked = 0.0, 0, 0, 0
        if isinstance(memory, EventPrefixIndex):
            self._translator, self._pages, self._count = Translator(ROOT, PAGE), ReplicaPages(memory, PAGE), 0
            self.tables.listen(self)

    # ------------------------------------------------------------ what the pool says, straight to the router

    def stored(self, parent: bytes | None, name: bytes, tokens: Any) -> None:
        self._told(self._translator.stored(parent, name, tokens))

    def removed(self, name: bytes) -> None:
        self._told(self._translator.removed(name))

    def cleared(self) -> None:
        self._told(self._translator.cleared())

    def _told(self, event: Any) -> None:
        self._pages.take(self._count, KVEventBatch(0.0, [event]))
        self._count += 1

    # ------------------------------------------------------------ requests

    def seat(self, now: float) -> Iterator[tuple[float, Any, float]]:
        """Those that find room: when each has its first token, and when its last."""
        while self.line and self.seated < SEATS:
            job, request, names = self.line[0]
            tokens, end = len(request.prompt), len(request.prompt) + request.output
            found = self.tables.find(names[: (tokens - 1) // PAGE])
            if not self.tables.fits(found, end, end + 1, 0):
                return
            self.line.popleft()
            self.seated += 1
            own, hits = self.tables.admit(found, end, end + 1), len(found[0]) * PAGE
            self.found, self.asked = self.found + hits, self.asked + tokens
            first = max(now, self.free_at) + (tokens - hits) * READ
            self.free_at = first
            self.tables.name(own, names, len(found[0]), request.prompt)
            yield first, (job, own, end), first + request.output * WRITE

    def leave(self, own: Any, end: int) -> None:
        self.tables.release(own, end + 1)
        self.seated -= 1


@dataclass
class Outcome:
    found: int = 0
    asked: int = 0
    waits: list[float] = field(default_factory=list)
    shares: list[int] = field(default_factory=list)

    def row(self, name: str) -> dict[str, Any]:
        p50, p99 = np.percentile(self.waits, (50, 99))
        times = {"ttft_mean": np.mean(self.waits), "ttft_p50": p50, "ttft_p99": p99}
        hits = {"hits": round(self.found / self.asked, 4)}
        rounded = {name: round(float(value), 3) for name, value in times.items()}
        return {"router": name} | hits | rounded | {"requests": self.shares}


def simulate(requests: list[Request], prompts: list[Any], replicas: list[Books], choose: Callable) -> Outcome:
    """Requests at their arrivals through a router; each replica takes what it has room for."""
    result, number = Outcome(), itertools.count()
    events: list[Any] = [(request.arrival, next(number), "arrives", i) for i, request in enumerate(requests)]
    heapq.heapify(events)
    by_replica = {own.replica: own for own in replicas}
    while events:
        now, _, what, of = heapq.heappop(events)
        if what == "arrives":
            prompt, names = prompts[of]
            job = RoutedRequest(prompt)
            chosen = choose([own.replica for own in replicas], prompt, 1 << 30, ())
            chosen.take(job)
            books = by_replica[chosen]
            books.line.append((job, requests[of], names))
        elif what == "begins":
            books, job, begun = of
            books.replica.begun(job)
            result.waits.append(now - begun)
            continue
        else:
            books, (job, own, end) = of
            books.leave(own, end)
            books.replica.leave(job)
        arrivals = {id(job): request.arrival for job, request, _ in books.line}
        for first, seat, last in books.seat(now):
            heapq.heappush(events, (first, next(number), "begins", (books, seat[0], arrivals[id(seat[0])])))
            heapq.heappush(events, (last, next(number), "ends", (books, seat)))
    result.found, result.asked = (sum(getattr(own, n) for own in replicas) for n in ("found", "asked"))
    result.shares = [own.replica.chosen for own in replicas]
    return result


def in_turn(
    replicas: Sequence[Replica], prompt: Prompt, most: int, but: Collection[Replica]
) -> Replica | None:
    """The next replica in round-robin order, whatever is cached."""
    open = [one for one in replicas if one.is_ready and one not in but and len(one.jobs) < most]
    return min(open, key=lambda one: one.chosen, default=None)


ROUTERS: dict[str, tuple[Callable, Callable]] = {
    "in turn": (in_turn, AssumedPrefixIndex),
    "least busy": (
        lambda own, prompt, *rest: best(own, Prompt(tokens=prompt.tokens), *rest),
        AssumedPrefixIndex,
    ),
    "pages, by what was sent": (best, AssumedPrefixIndex),
    "pages, by events": (best, lambda pages: EventPrefixIndex()),
}


def study(counts: list[int], pages: list[int], loads: list[float]) -> list[dict[str, Any]]:
    entries = read(MOONCAKE)
    requests = with_prefixes(entries, 30_000, DIVISOR)
    prompts = [(named(r.prompt, PAGE, TOKENS), engine_names(r.prompt)) for r in requests]
    rows = []
    for count, size, load in itertools.product(counts, pages, loads):
        work = sum(len(r.prompt) for r in requests) * READ / count
        stretch = work / load / entries[-1].arrival
        timed = [
            Request(r.prompt, r.output, e.arrival * stretch) for r, e in zip(requests, entries, strict=True)
        ]
        for name, (choose, memory) in ROUTERS.items():
            replicas = [Books(size, memory(size)) for _ in range(count)]
            row = simulate(timed, prompts, replicas, choose).row(name)
            rows.append({"replicas": count, "cache_tokens": size * PAGE * DIVISOR, "load": load} | row)
            print(json.dumps(rows[-1]), flush=True)
    return rows


def engine_names(prompt: list[int]) -> list[bytes]:
    names: list[bytes] = []
    extend(names, prompt, len(prompt) // PAGE, PAGE, ROOT)
    return names


def naming(folder: str) -> dict[str, Any]:
    """Milliseconds for a prompt of some 8,000 tokens of Python."""
    from duetto.serve.text.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    text = Path(json.__file__).read_text() * 20
    text = text[: len(text) * 8000 // len(tokenizer.encode(text))]
    body = {"messages": [{"role": "user", "content": text}]}
    found: dict[str, Any] = {"letters": len(text), "tokens": len(tokenizer.encode(text))}
    for name, make in (("text", TextNaming(PAGE)), ("tokens", TokenNaming(tokenizer, PAGE))):
        spans = []
        for _ in range(20):
            begin = time.perf_counter()
            make("/v1/chat/completions", body)
            spans.append(time.perf_counter() - begin)
        found[f"{name}_ms"] = round(1e3 * float(np.median(spans)), 2)
    return found


# ---------------------------------------------------------------- real servers


def real(count: int) -> dict[str, Any]:
    """The share of prompt tokens that two servers found, by how requests were dealt to them."""
    chosen = conversations(read(MOONCAKE), count, 16_000, turns=2)
    requests = with_prefixes([replace(e, output=8 * SHORT) for e in chosen], 300, SHORT)
    found: dict[str, Any] = {"requests": len(requests)}
    for name, choose in (("in turn", in_turn), ("pages, by what was sent", best)):
        with ExitStack() as stack:
            ports = [stack.enter_context(started(SERVER))[1] for _ in range(2)]
            asyncio.run(ask(ports, [r.prompt for r in requests], choose))
            counts = [counted(port) for port in ports]
        hits, queries = (sum(one[i] for one in counts) for i in (0, 1))
        found[name] = {"hits": round(hits / queries, 4), "prompt_tokens": queries}
    return found


async def ask(ports: list[int], prompts: list[list[int]], choose: Callable) -> None:
    """All prompts in their order, one at a time, through a router in this process."""
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    options = RouterOptions(replica=urls, cache_tokens=1536, page_size=8)
    server = ServerOptions()
    replicas = replicas_of(options)
    line = RequestQueue(replicas, options.max_in_flight, server, choose)
    proxy = Proxy(line, PrefillPool({}, 1), TextNaming(8), options, server)
    health = Health(replicas, line, options)
    transport = httpx.ASGITransport(app(replicas, proxy, server, []))
    while not all(one.is_ready for one in replicas):
        await asyncio.sleep(0.1)
    async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=600) as http:
        for prompt in prompts:
            reply = await http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 8})
            reply.raise_for_status()
    health.close()


def counted(port: int) -> tuple[float, float]:
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text
    found = dict(re.findall(r"^vllm:prefix_cache_(hits|queries)_total{.*} (\S+)$", text, re.MULTILINE))
    return float(found["hits"]), float(found["queries"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--cache-tokens", type=int, nargs="+", default=[500_000, 2_000_000])
    parser.add_argument(
        "--load",
        type=float,
        nargs="+",
        default=[0.5, 0.7],
        help="of what the replicas can read, without hits",
    )
    parser.add_argument("--real", type=int, nargs="?", const=80, metavar="INT", help="so many requests")
    parser.add_argument("--naming", metavar="FOLDER", help="measure a tokenizer's folder")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.real:
        return print(json.dumps(real(args.real)))
    if args.naming:
        return print(json.dumps(naming(args.naming)))
    pages = [tokens // DIVISOR // PAGE for tokens in args.cache_tokens]
    about = {"trace": MOONCAKE.name, "divisor": DIVISOR, "page": PAGE, "block": BLOCK}
    rows = study(args.replicas, pages, args.load)
    if args.output:
        args.output.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
