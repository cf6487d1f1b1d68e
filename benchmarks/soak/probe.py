"""Resources of each process, read from the system and from its metrics."""

import asyncio
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from benchmarks.soak.clients import Clients, FirstToken
from benchmarks.soak.fleet import SERVICES, Fleet
from benchmarks.soak.server import Server, descendants

SAMPLE = re.compile(r'^([\w:]+)(?:\{(?:.*?le="([^"]+)")?[^}]*\})? (\S+)$', re.MULTILINE)
FIRST = "vllm:time_to_first_token_seconds_bucket"
GAUGES = {  # name of a sample, and the metric
    "pages": "vllm:kv_cache_usage_perc",
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
}
TOTALS = {
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generated_tokens": "vllm:generation_tokens_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "accepted_draft_tokens": "vllm:spec_decode_num_accepted_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
    "resumed": "duetto:router_resumed_total",
    "retried": "duetto:router_retried_total",
    "replicas_lost": "duetto:router_lost_total",
}
Buckets = Mapping[float, float]  # cumulative counts by their upper bound


class Probe:
    """Writes a line of JSON for all processes in each period."""

    def __init__(self, fleet: Fleet, clients: Clients, file: Path, period: float = 10.0):
        self.fleet, self.clients, self.file, self.period = fleet, clients, file, period
        self.lines: list[dict[str, Any]] = []
        self._buckets: dict[tuple[str, int], Buckets] = {}
        self._read = 0  # first tokens of earlier lines

    async def run(self, until: float) -> None:
        begun = time.monotonic()
        while time.monotonic() < until:
            await asyncio.sleep(self.period - (time.monotonic() - begun) % self.period)
            await self.line(time.monotonic() - begun)

    async def line(self, at: float) -> None:
        """Sample all processes once."""
        servers = self.fleet.servers
        found = await asyncio.gather(*map(self.sample, servers.values()))
        firsts, self._read = self.clients.firsts[self._read :], len(self.clients.firsts)
        line = {
            "at": round(at, 1),
            "processes": dict(zip(servers, found, strict=True)),
            "clients": {"done": dict(self.clients.done), "ttft": ttft(firsts)},
        }
        self.lines.append(line)
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    async def sample(self, server: Server) -> dict[str, Any]:
        """Return the figures of a process; those of its metrics are missing while it starts."""
        found = {
            "life": server.life,
            "age": round(time.monotonic() - server.begun, 1),
            **resources(server.pid),
        }
        try:
            text = (await self.fleet.http.get(f"{server.url}/metrics", timeout=5.0)).text
        except httpx.HTTPError:
            return found
        sums, buckets = metrics(text)
        names = GAUGES | TOTALS
        found |= {name: sums[metric] for name, metric in names.items() if metric in sums}
        if buckets:
            before = self._buckets.get((server.name, server.life), {})
            self._buckets[server.name, server.life] = buckets
            found |= {f"ttft_p{q}": in_buckets(before, buckets, q / 100) for q in (50, 99)}
        return found


def resources(pid: int) -> dict[str, float]:
    """Return a process's resident set in MiB, its descriptors, threads, processor seconds and children; none
    of them if it has ended."""
    place = Path(f"/proc/{pid}")
    try:
        status = dict(re.findall(r"^(VmRSS|Threads):\s+(\d+)", (place / "status").read_text(), re.MULTILINE))
        fields = (place / "stat").read_text().rpartition(")")[2].split()
        descriptors = len(os.listdir(place / "fd"))
    except (FileNotFoundError, ProcessLookupError):
        return {}
    if "VmRSS" not in status:  # it is a zombie
        return {}
    return {
        "rss_mib": round(int(status["VmRSS"]) / 1024, 1),
        "descriptors": descriptors,
        "threads": int(status["Threads"]),
        "cpu_seconds": (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
        "children": len(descendants(pid)),
    }


def metrics(text: str) -> tuple[dict[str, float], Buckets]:
    """Return the sums of metrics by their names, and the buckets of the times to the first token."""
    sums: dict[str, float] = {}
    buckets: dict[float, float] = {}
    for name, bound, value in SAMPLE.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
        if name == FIRST:
            buckets[float(bound)] = buckets.get(float(bound), 0.0) + float(value)
    return sums, buckets


def in_buckets(before: Buckets, now: Buckets, share: float) -> float | None:
    """Return the upper bound of the bucket in which a quantile lies; None without observations."""
    counts = {bound: count - before.get(bound, 0.0) for bound, count in sorted(now.items())}
    total = max(counts.values(), default=0.0)
    return next((bound for bound, count in counts.items() if total and count >= share * total), None)


def quantile(values: list[float], share: float) -> float:
    """Return a quantile as the smallest value that is at least as large as this share of all."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def ttft(firsts: list[FirstToken]) -> dict[str, dict[str, float]]:
    """Return the number of first tokens of each service, and quantiles of their times in seconds."""
    found = {}
    for service in SERVICES:
        if own := [first.seconds for first in firsts if first.service == service]:
            found[service] = {"streams": len(own)} | {
                f"p{q}": round(quantile(own, q / 100), 4) for q in (50, 99)
            }
    return found
