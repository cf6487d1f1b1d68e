"""Cost of placing a request in a router: processor time at 10, 100 and 1,000 replicas, and the memory of a
million known prefixes.

    python benchmarks/studies/placement.py [--output FILE]

Prompts have 8,000 tokens in pages of 64. Three kinds of fleets: no replica has a page of the prompt, one has
all, and all have all. Loads differ at random.
"""

import argparse
import json
import statistics
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from duetto.serve.kv.routing.placement import Prompt, Replica, RoutedRequest, best
from duetto.serve.kv.routing.prefix_index import AssumedPrefixIndex
from duetto.serve.server.router.prompts import TextNaming

TOKENS, PAGE = 8000, 64
COUNTS = 10, 100, 1000
KNOWN = ("none", "one", "all")
CACHE = 1 << 18  # tokens that a replica is assumed to hold, the router's default
PREFIXES = 1_000_000
REPEATS = 7


def fleet(count: int, known: str, prompt: Prompt) -> list[Replica]:
    """Return replicas with loads, of which some have the prompt."""
    replicas = [Replica(str(i), AssumedPrefixIndex(CACHE // PAGE)) for i in range(count)]
    for i, own in enumerate(replicas):
        own.is_up = own.is_ready = True
        own.take(RoutedRequest(Prompt((), PAGE, Random(i).randrange(20_000))))
        if known == "all" or (known == "one" and i == count // 2):
            own.memory.sent(prompt.names)
    return replicas


def microseconds(replicas: list[Replica], prompt: Prompt) -> float:
    """Return the median of what one placement takes of the processor, over repeats of many."""
    many = max(1, 5000 // len(replicas))

    def one() -> float:
        begun = time.process_time()
        for _ in range(many):
            best(replicas, prompt, 1 << 30, ())
        return 1e6 * (time.process_time() - begun) / many

    return round(statistics.median(one() for _ in range(REPEATS)), 1)


def naming() -> float:
    """Return the microseconds of naming the pages of a prompt of token ids."""
    body, name = {"prompt": list(range(TOKENS))}, TextNaming(PAGE)
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
        index.sent([random.randbytes(16) for _ in range(pages)])
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return round(taken / PREFIXES, 1)


def measured() -> Iterator[dict[str, Any]]:
    prompt = TextNaming(PAGE)("/v1/completions", {"prompt": list(range(TOKENS))})
    for count in COUNTS:
        for known in KNOWN:
            replicas = fleet(count, known, prompt)
            yield {"replicas": count, "known": known, "microseconds": microseconds(replicas, prompt)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, help="file for the figures")
    options = parser.parse_args()
    found: dict[str, Any] = {"naming_microseconds": naming(), "bytes_of_a_prefix": bytes_of_a_prefix()}
    found["placements"] = list(measured())
    text = json.dumps(found, indent=1)
    print(text)
    if options.output:
        options.output.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
