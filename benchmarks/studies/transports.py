"""Pages between two processes of this machine by each transport, in turn: pages and bytes a second.

    python benchmarks/studies/transports.py --json FILE     # with NIXL where it is installed

A process owns pages and hands them over at a door; this one fetches them, one after the other, checks their
sums, and has bytes of its own in the end, as an engine does that decodes.
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import date
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from duetto.serve.kv.disagg.client import RemotePrefillClient
from duetto.serve.kv.disagg.server import PrefillServer
from duetto.serve.kv.disagg.service import PrefillService
from duetto.serve.kv.disagg.transport import PageTransport, make_transports
from duetto.serve.kv.offload.tier import PageContent, PageKey, key_window, page_key

SIZES = [1 << 16, 1 << 20, 1 << 23]  # bytes of a page of each window
NIXL = {"nixl": {}, "nixl_tcp": {"UCX_TLS": "tcp"}}  # and what UCX is told
NAMES = ["shared_memory", "tcp", *(NIXL if find_spec("nixl") else ())]


class Pages:
    """One of each window."""

    room_bytes, is_connected = 1, True

    def __init__(self):
        self.contents = [os.urandom(size) for size in SIZES]

    def fetch(self, key: PageKey) -> PageContent:
        return self.contents[key_window(key)]


def ways(name: str) -> dict[str, PageTransport]:
    os.environ.update(NIXL.get(name, {}))
    made = make_transports("nixl" if name in NIXL else name)
    os.environ.pop("UCX_TLS", None)
    return made


def own(name: str, here: Connection) -> None:
    """What the process does that owns pages, until nobody wants them."""
    door = PrefillServer(("127.0.0.1", 0), ways(name))
    door.set_realm(b"pages", SIZES)
    door.serve(cast(PrefillService, Pages()))
    here.send(door.address)
    here.recv()


@contextmanager
def reached(name: str) -> Iterator[RemotePrefillClient]:
    here, there = multiprocessing.Pipe()
    owner = multiprocessing.get_context("spawn").Process(target=own, args=(name, there))
    owner.start()
    far = RemotePrefillClient(here.recv(), ways(name))
    far.expect_realm(b"pages", SIZES)
    while not far.is_connected:
        time.sleep(0.01)
    assert far.transport == ("nixl" if name in NIXL else name)
    yield far
    far.close()
    here.send(None)
    owner.join()


def seconds(far: RemotePrefillClient, window: int, pages: int) -> float:
    """Of a page."""
    begin = time.perf_counter()
    for _ in range(pages):
        assert len(far.fetch(page_key(b"n" * 16, window)) or b"") == SIZES[window]
    return (time.perf_counter() - begin) / pages


def measured(repeats: int, total: int) -> dict[str, Any]:
    """Medians of repeats, each of so many bytes by every transport."""
    taken: dict[tuple[int, str], list[float]] = {(w, name): [] for w in range(len(SIZES)) for name in NAMES}
    with ExitStack() as stack:
        fars = {name: stack.enter_context(reached(name)) for name in NAMES}
        for _ in range(1 + repeats):
            for (window, name), each in taken.items():
                each.append(seconds(fars[name], window, min(max(total // SIZES[window], 4), 256)))
    rows: dict[str, Any] = {}
    for (window, name), each in taken.items():
        one = statistics.median(each[1:])  # the first is for connections
        row = {"pages_a_second": round(1 / one), "gb_a_second": round(SIZES[window] / one / 1e9, 2)}
        rows.setdefault(f"{SIZES[window] >> 10} KiB", {})[name] = row
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--bytes", type=int, default=1 << 26, help="of each repeat by each transport")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = {
        "date": str(date.today()),
        "machine": platform.processor() or platform.machine(),
        "repeats": args.repeats,
        "pages": measured(args.repeats, args.bytes),
    }
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
