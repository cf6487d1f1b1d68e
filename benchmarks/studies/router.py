"""Prompts that find their beginnings: a router that knows pages against one that deals in turn.

    python benchmarks/studies/router.py --output FILE
    python benchmarks/studies/router.py --routers 1 2 --load 0.7 --kinds "pages, by what was sent"
    python benchmarks/studies/router.py --routers 1 2 --load 0.7 --dialogues 20 --seeds 0 1 2 --replicas 1000
    python benchmarks/studies/router.py --real
    python benchmarks/studies/router.py --naming checkpoints/demo

The Mooncake trace goes to replicas that compute nothing and keep real books: the engine's pools, page tables
and names, in a time of their own, in which a prompt takes so many seconds for each token that is not found,
one prompt after the other, and each generated token one step, all together. The router's own code chooses.
Times to the first token are those of such replicas, and say what finding prompts is worth. With several
--routers the requests take turns among them, and each knows only what it has sent itself. With --dialogues
there are drawn conversations in place of the trace, which has too few for a thousand replicas.

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
from benchmarks.traces import BLOCK_TOKENS, MOONCAKE, Request, conversations, read, with_prefixes
from duetto.kvcache.page_hash import extend_page_hashes, root_hash
from duetto.kvcache.tables import PageTables
from duetto.serve.kv.events import EventTranslator, KVEventBatch
from duetto.serve.kv.routing.placement import (
    TOKENS_PER_ROW,
    Replica,
    RoutedPrompt,
    RoutedRequest,
    choose_replica,
)
from duetto.serve.kv.routing.prefix_index import AssumedPrefixIndex, EventPrefixIndex
from duetto.serve.options.router import RouterOptions
from duetto.serve.options.server import ServerOptions
from duetto.serve.server.router.events import PrefixIndexUpdater
from duetto.serve.server.router.health import HealthChecker
from duetto.serve.server.router.main import make_replicas, make_router_app
from duetto.serve.server.router.prompts import TOKENS_ROOT, TextPageHasher, TokenPageHasher, hash_pages
from duetto.serve.server.router.proxy import Proxy
from duetto.serve.server.router.request_queue import PrefillPool, RequestQueue

DIVISOR, PAGE = 8, 16  # lengths of the trace are divided, so that 64 tokens stand for a block of 512
ROOT = root_hash("simulated")
SEATS, MANY = 64, 16  # requests at once of a replica; replicas whose shares are not listed
SYSTEM, TURN = 4096, 1024  # tokens of drawn conversations: the system prompt, and what each turn adds
SHORT = 64  # lengths of the trace are divided by so much for real servers
SERVER = [
    "-m", "duetto", "serve", "--port", "0", "--quiet", "--max-num-seqs", "4", "--max-model-len", "384",
    "--page-size", "8", "--max-batched-token-mem", "1536", "--max-prefill-delay", "0",
]  # fmt: skip
READ, WRITE = 1 / 1000, 0.02  # seconds: a token of a prompt, a step (an 8B model on an H100, over DIVISOR)


class Books:
    """A replica that computes nothing: its pages, and when it would have computed what. `views` has one of it
    for each router, with what that router knows."""

    def __init__(self, name: str, pages: int, memories: Sequence[AssumedPrefixIndex | EventPrefixIndex]):
        self.tables = PageTables([None], [pages], PAGE, step_tokens=512)
        self.views = [Replica(name, memory, TOKENS_PER_ROW // DIVISOR) for memory in memories]
        for view in self.views:
            view.is_ready = True
        self.line: deque[Any] = deque()
        self.free_at, self.seated, self.found, self.asked = 0.0, 0, 0, 0
        events = [memory for memory in memories if isinstance(memory, EventPrefixIndex)]
        if events:
            self._translator, self._count = EventTranslator(ROOT, PAGE), 0
            self._pages = [PrefixIndexUpdater(memory, PAGE) for memory in events]
            self.tables.set_listener(self)

    # ------------------------------------------------------------ what the pool says, straight to the router

    def on_stored(self, parent_hash: bytes | None, page_hash: bytes, tokens: Any, salt: bytes = b"") -> None:
        self._told(self._translator.translate_stored(parent_hash, page_hash, tokens, salt))

    def on_removed(self, page_hash: bytes) -> None:
        self._told(self._translator.translate_removed(page_hash))

    def on_cleared(self) -> None:
        self._told(self._translator.translate_cleared())

    def _told(self, event: Any) -> None:
        for pages in self._pages:
            pages.apply_batch(self._count, KVEventBatch(0.0, [event]))
        self._count += 1

    # ------------------------------------------------------------ requests

    def seat(self, now: float) -> Iterator[tuple[float, Any, float]]:
        """Those that find room: when each has its first token, and when its last."""
        while self.line and self.seated < SEATS:
            job, request, names, view = self.line[0]
            tokens, end = len(request.prompt), len(request.prompt) + request.output
            found = self.tables.find_prefix(names[: (tokens - 1) // PAGE])
            if not self.tables.fits(found, end, end + 1, 0):
                return
            self.line.popleft()
            self.seated += 1
            own, hits = self.tables.admit(found, end, end + 1), len(found[0]) * PAGE
            self.found, self.asked = self.found + hits, self.asked + tokens
            first = max(now, self.free_at) + (tokens - hits) * READ
            self.free_at = first
            self.tables.cache_pages(own, names, len(found[0]), request.prompt)
            yield first, (job, own, end, view, request.arrival), first + request.output * WRITE

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
        shares = {"requests": self.shares} if len(self.shares) <= MANY else {}
        return {"router": name} | hits | rounded | shares


def simulate(requests: list[Request], prompts: list[Any], replicas: list[Books], choose: Callable) -> Outcome:
    """Requests at their arrivals, which take turns among routers; each replica takes what it has room for."""
    result, number = Outcome(), itertools.count()
    events: list[Any] = [(request.arrival, next(number), "arrives", i) for i, request in enumerate(requests)]
    heapq.heapify(events)
    routers = [list(views) for views in zip(*(own.views for own in replicas), strict=True)]
    by_view = {view: own for own in replicas for view in own.views}
    while events:
        now, _, what, of = heapq.heappop(events)
        if what == "arrives":
            prompt, names = prompts[of]
            job = RoutedRequest(prompt)
            chosen = choose(routers[of % len(routers)], prompt, 1 << 30, ())
            chosen.add_request(job)
            books = by_view[chosen]
            books.line.append((job, requests[of], names, chosen))
        elif what == "begins":
            job, _, _, view, begun = of
            view.on_prefill_done(job)
            result.waits.append(now - begun)
            continue
        else:
            job, own, end, view, _ = of
            books = by_view[view]
            books.leave(own, end)
            view.remove_request(job)
        for first, seat, last in books.seat(now):
            heapq.heappush(events, (first, next(number), "begins", seat))
            heapq.heappush(events, (last, next(number), "ends", seat))
    result.found, result.asked = (sum(getattr(own, n) for own in replicas) for n in ("found", "asked"))
    result.shares = [sum(view.chosen for view in own.views) for own in replicas]
    return result


def in_turn(
    replicas: Sequence[Replica], prompt: RoutedPrompt, max_in_flight: int, excluded: Collection[Replica]
) -> Replica | None:
    """The next replica in round-robin order, whatever is cached."""
    open = [
        one for one in replicas if one.is_ready and one not in excluded and len(one.requests) < max_in_flight
    ]
    return min(open, key=lambda one: one.chosen, default=None)


BY_SENT = "pages, by what was sent"
ROUTERS: dict[str, tuple[Callable, Callable]] = {
    "in turn": (in_turn, AssumedPrefixIndex),
    "least busy": (
        lambda own, prompt, *rest: choose_replica(own, RoutedPrompt(tokens=prompt.tokens), *rest),
        AssumedPrefixIndex,
    ),
    BY_SENT: (choose_replica, AssumedPrefixIndex),
    "pages, by events": (choose_replica, lambda pages: EventPrefixIndex()),
}


def of_trace() -> list[Request]:
    """The requests of the Mooncake trace."""
    entries = read(MOONCAKE)
    requests = with_prefixes(entries, 30_000, DIVISOR)
    return [replace(r, arrival=e.arrival) for r, e in zip(requests, entries, strict=True)]


def dialogues(count: int, seed: int) -> list[Request]:
    """Drawn conversations of 4 turns on average, by arrival within a second: each turn has the tokens of
    those before it, behind one of 20 system prompts."""
    draw, requests = np.random.default_rng(seed), list[Request]()
    systems = draw.integers(3, 30_000, (20, SYSTEM // DIVISOR)).tolist()
    for _ in range(count // 4):
        prompt, arrival = systems[draw.integers(20)], draw.random()
        for _ in range(draw.geometric(1 / 4)):
            prompt = prompt + draw.integers(3, 30_000, TURN // DIVISOR).tolist()
            requests.append(Request(prompt, TURN // DIVISOR // 4, arrival))
            arrival += draw.exponential(0.05)
    return sorted(requests, key=lambda request: request.arrival)


def study(
    requests: list[Request],
    counts: list[int],
    pages: list[int],
    loads: list[float],
    routers: list[int],
    kinds: Collection[str],
) -> list[dict[str, Any]]:
    prompts = [(hash_pages(r.prompt, PAGE, TOKENS_ROOT), engine_names(r.prompt)) for r in requests]
    rows = []
    for count, size, load in itertools.product(counts, pages, loads):
        work = sum(len(r.prompt) for r in requests) * READ / count
        stretch = work / load / requests[-1].arrival
        timed = [replace(r, arrival=r.arrival * stretch) for r in requests]
        for name, several in itertools.product(kinds, routers):
            choose, memory = ROUTERS[name]
            replicas = [Books(str(i), size, [memory(size) for _ in range(several)]) for i in range(count)]
            row = simulate(timed, prompts, replicas, choose).row(name) | {"routers": several}
            rows.append({"replicas": count, "cache_tokens": size * PAGE * DIVISOR, "load": load} | row)
            print(json.dumps(rows[-1]), flush=True)
    return rows


def engine_names(prompt: list[int]) -> list[bytes]:
    names: list[bytes] = []
    extend_page_hashes(names, prompt, len(prompt) // PAGE, PAGE, ROOT)
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
    for name, make in (("text", TextPageHasher(PAGE)), ("tokens", TokenPageHasher(tokenizer, PAGE))):
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
    requests = with_prefixes([replace(e, output_tokens=8 * SHORT) for e in chosen], 300, SHORT)
    found: dict[str, Any] = {"requests": len(requests)}
    for name, choose in (("in turn", in_turn), (BY_SENT, choose_replica)):
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
    replicas = make_replicas(options)
    line = RequestQueue(replicas, options.max_in_flight, server, choose)
    proxy = Proxy(line, PrefillPool({}, 1), TextPageHasher(8), options, server)
    health = HealthChecker(replicas, line, options)
    transport = httpx.ASGITransport(make_router_app(replicas, proxy, server, []))
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
    parser.add_argument("--kinds", nargs="+", choices=ROUTERS, default=[*ROUTERS])
    parser.add_argument("--routers", type=int, nargs="+", default=[1])
    parser.add_argument("--dialogues", type=int, metavar="INT", help="so many requests for each replica")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the drawn conversations")
    parser.add_argument("--real", type=int, nargs="?", const=80, metavar="INT", help="so many requests")
    parser.add_argument("--naming", metavar="FOLDER", help="measure a tokenizer's folder")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.real:
        return print(json.dumps(real(args.real)))
    if args.naming:
        return print(json.dumps(naming(args.naming)))
    pages = [tokens // DIVISOR // PAGE for tokens in args.cache_tokens]
    trace = MOONCAKE.name if args.dialogues is None else f"{args.dialogues} drawn requests for each replica"
    about = {"trace": trace, "divisor": DIVISOR, "page": PAGE, "block": BLOCK_TOKENS}
    rows = []
    for count, seed in itertools.product(args.replicas, [None] if args.dialogues is None else args.seeds):
        requests = of_trace() if seed is None else dialogues(args.dialogues * count, seed)
        found = study(requests, [count], pages, args.load, args.routers, args.kinds)
        rows += found if seed is None else [row | {"seed": seed} for row in found]
    if args.output:
        args.output.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
