"""The Azure trace served by one engine, and by two in two processes, of which one computes the prompts.

    python benchmarks/studies/handover.py --requests 200 --rate 4 --json FILE

Servers of the shipped model answer the same requests at the trace's moments. Each answer of the two has to
have the tokens of the one's, and their log-probabilities to the bit. What is told beside that: prompt tokens
that were handed over, and latencies, which on a machine whose cores both engines share say what handing over
costs, not what it gains.
"""

import argparse
import asyncio
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import httpx
from server import started  # beside this file

from benchmarks.traces import AZURE, Request, Scale, read, replayed
from duetto.serve.runtime.multihost.supervisor import free_port

SCALE = Scale(divisor=4, prompt=384, output=64)
VOCABULARY = 250  # tokens that are no marks of the shipped model
SIZES = [
    "--max-model-len", "512", "--max-num-seqs", "16", "--max-prefill-tokens", "256", "--page-size", "16",
    "--max-queued", "4096", "--no-background-compilation", "--quiet",
]  # fmt: skip


@dataclass
class Answer:
    """What came of a request: text and log-probabilities, tokens that were found, and moments in seconds."""

    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    cached: int = 0
    begin: float = 0.0
    moments: list[float] = field(default_factory=list)

    @property
    def first(self) -> float:
        return self.moments[0] - self.begin

    @property
    def between(self) -> float:
        return (self.moments[-1] - self.moments[0]) / max(len(self.logprobs) - 1, 1)


def body(request: Request, i: int) -> dict[str, Any]:
    sampling = {"temperature": 0.0} if i % 2 else {"temperature": 0.9, "seed": i}
    asked = {"prompt": request.prompt, "max_tokens": request.output, "ignore_eos": True, "logprobs": 1}
    return sampling | asked | {"stream": True, "stream_options": {"include_usage": True}}


async def answered(http: httpx.AsyncClient, request: Request, i: int, start: float) -> Answer:
    await asyncio.sleep(start + request.arrival - time.monotonic())
    found = Answer(begin=time.monotonic())
    async with http.stream("POST", "/v1/completions", json=body(request, i)) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                take(found, json.loads(line[6:]))
    return found


def take(found: Answer, piece: dict[str, Any]) -> None:
    for choice in piece["choices"]:
        found.text += choice["text"]
        if choice["logprobs"]:
            found.logprobs += choice["logprobs"]["token_logprobs"]
            found.moments.append(time.monotonic())
    if usage := piece.get("usage"):
        found.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


async def every(port: int, requests: Sequence[Request]) -> list[Answer]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600, limits=limits) as http:
        start = time.monotonic()
        return await asyncio.gather(*(answered(http, r, i, start) for i, r in enumerate(requests)))


def served(roles: Sequence[list[str]], requests: Sequence[Request]) -> list[Answer]:
    """By servers, of which clients ask the last."""
    with ExitStack() as stack:
        ports = [
            stack.enter_context(started(["-m", "duetto", "serve", "--port", "0", *SIZES, *role]))[1]
            for role in roles
        ]
        time.sleep(1)  # until they have met
        return asyncio.run(every(ports[-1], requests))


def figures(answers: Sequence[Answer]) -> dict[str, float]:
    """Seconds, and prompt tokens that were found."""
    firsts, between = [a.first for a in answers], [a.between for a in answers]
    centile = statistics.quantiles(between, n=100)[98]
    return {
        "ttft_p50": round(statistics.median(firsts), 4),
        "ttft_p99": round(statistics.quantiles(firsts, n=100)[98], 4),
        "tpot_p50": round(statistics.median(between), 4),
        "tpot_p99": round(centile, 4),
        "found_tokens": sum(a.cached for a in answers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second on average")
    parser.add_argument("--transport", help="such as nixl; default: shared memory")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    requests = replayed([SCALE(entry) for entry in read(AZURE)[: args.requests]], VOCABULARY, args.rate)
    place = ["--kv-address", f"127.0.0.1:{free_port()}"]
    place += ["--kv-transport", args.transport] if args.transport else []
    one = served([[]], requests)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        decode = ["--kv-role", "decode", *place, "--report", str(report)]
        two = served([["--kv-role", "prefill", *place], decode], requests)
        tiers = json.loads(report.read_text())["tiers"]
    same = sum((a.text, a.logprobs) == (b.text, b.logprobs) for a, b in zip(one, two, strict=True))
    result = {
        "date": str(date.today()),
        "machine": platform.processor() or platform.machine(),
        "trace": f"{len(requests)} of Azure's conversations, {SCALE}, {args.rate:g} a second",
        "prompt_tokens": sum(len(r.prompt) for r in requests),
        "output_tokens": sum(len(a.logprobs) for a in two),
        "answers_with_the_same_bits": same,
        "one": figures(one),
        "two": figures(two),
        "pages": {name: tiers[name] for name in ("fetched", "late")} | {"peer": tiers["peer"]},
    }
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    assert same == len(requests)


if __name__ == "__main__":
    main()
