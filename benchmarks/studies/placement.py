"""Cost of placing a request in a router: processor time at 10, 100 and 1,000 replicas, and the memory of a
million known prefixes.

    python benchmarks/studies/placement.py [--output FILE]

Prompts have 8,000 tokens in pages of 64. Four kinds of fleets: no replica has a page of the prompt, one has
all, all have all, and each second one has the first half. Loads differ at random.

A whole request is measured too: a `duetto route` in front of 50 servers that answer at once, the processor
time of its process for each request, without that of its health checks. Linux only.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx

from benchmarks.studies.server import started
from duetto.serve.kv.routing.placement import Replica, RoutedPrompt, RoutedRequest, choose_replica
from duetto.serve.kv.routing.prefix_index import AssumedPrefixIndex
from duetto.serve.server.router.prompts import TextPageHasher

TOKENS, PAGE = 8000, 64
COUNTS = 10, 100, 1000
KNOWN = ("none", "one", "all", "half")
CACHE = 1 << 18  # tokens that a replica is assumed to hold, the router's default
PREFIXES = 1_000_000
REPEATS = 7
SERVERS, REQUESTS, IDLE = 50, 400, 10.0  # of whole requests; seconds in which the router has none


def fleet(count: int, known: str, prompt: RoutedPrompt) -> list[Replica]:
    """Return replicas with loads, of which some have the prompt."""
    replicas = [Replica(str(i), AssumedPrefixIndex(CACHE // PAGE)) for i in range(count)]
    for i, own in enumerate(replicas):
        own.is_up = own.is_ready = True
        own.add_request(RoutedRequest(RoutedPrompt((), PAGE, Random(i).randrange(20_000))))
        if known == "all" or (known == "one" and i == count // 2):
            own.prefix_index.on_prompt_sent(prompt.page_hashes)
        if known == "half" and i % 2:
            own.prefix_index.on_prompt_sent(prompt.page_hashes[: len(prompt.page_hashes) // 2])
    return replicas


def microseconds(replicas: list[Replica], prompt: RoutedPrompt) -> float:
    """Return the median of what one placement takes of the processor, over repeats of many."""
    many = max(1, 5000 // len(replicas))

    def one() -> float:
        begun = time.process_time()
        for _ in range(many):
            choose_replica(replicas, prompt, 1 << 30, ())
        return 1e6 * (time.process_time() - begun) / many

    return round(statistics.median(one() for _ in range(REPEATS)), 1)


def naming() -> float:
    """Return the microseconds of naming the pages of a prompt of token ids."""
    body, name = {"prompt": list(range(TOKENS))}, TextPageHasher(PAGE)
    begun = time.process_time()
    for _ in range(50):
        name("/v1/completions", body)
    return round(1e6 * (time.process_time() - begun) / 50, 1)


def bytes_of_a_prefix() -> float:
    """Return the bytes that each of a million known pages takes."""
    random, index = Random(0), AssumedPrefixIndex(1 << 40)
    pages = TOKENS // PAGE
    tracemalloc.start()
    for _ in range(PREFIXES // pages):
        index.on_prompt_sent([random.randbytes(16) for _ in range(pages)])
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return round(taken / PREFIXES, 1)


def measured() -> Iterator[dict[str, Any]]:
    prompt = TextPageHasher(PAGE)("/v1/completions", {"prompt": list(range(TOKENS))})
    for count in COUNTS:
        for known in KNOWN:
            replicas = fleet(count, known, prompt)
            yield {"replicas": count, "known": known, "microseconds": microseconds(replicas, prompt)}


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer a health check or a request."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = next((int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length:")), 0)
    await reader.readexactly(length)
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
    writer.close()


def seconds_of(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def whole_requests() -> dict[str, Any]:
    """Measure a router process in front of real connections."""
    servers = [await asyncio.start_server(answer, "127.0.0.1", 0) for _ in range(SERVERS)]
    words = [f"--replica=http://127.0.0.1:{one.sockets[0].getsockname()[1]}" for one in servers]
    router = started(["-m", "duetto", "route", "--port", "0", *words])
    pid, port = await asyncio.to_thread(router.__enter__)
    try:
        await asyncio.sleep(2.0)
        begun = seconds_of(pid)
        await asyncio.sleep(IDLE)
        idle, begun, start = (seconds_of(pid) - begun) / IDLE, seconds_of(pid), time.monotonic()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            for i in range(REQUESTS):
                prompt = [i, *range(1, TOKENS)]
                (await http.post("/v1/completions", json={"prompt": prompt})).raise_for_status()
        taken = seconds_of(pid) - begun - idle * (time.monotonic() - start)
    finally:
        await asyncio.to_thread(router.__exit__, None, None, None)
        for one in servers:
            one.close()
    return {"replicas": SERVERS, "microseconds": round(1e6 * taken / REQUESTS), "idle_share": round(idle, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, help="file for the figures")
    options = parser.parse_args()
    found: dict[str, Any] = {"naming_microseconds": naming(), "bytes_of_a_prefix": bytes_of_a_prefix()}
    found["placements"] = list(measured())
    found["whole_requests"] = asyncio.run(whole_requests())
    text = json.dumps(found, indent=1)
    print(text)
    if options.output:
        options.output.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
