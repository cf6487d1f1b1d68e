"""Two servers and a router as users start them, and kills of servers in the middle of streams."""

import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from cases.serving import LIMIT, Process
from cases.waiting import until

import duetto.checkpoints
from duetto.serve.runtime.multihost.supervisor import free_port

pytestmark = pytest.mark.minutes
DEMO = Path(duetto.checkpoints.__file__).parent / "demo"
SIZES = ["--max-num-seqs", "8", "--max-prefill-tokens", "64", "--max-model-len", "512", "--page-size", "16"]


def replica_at(port: int, *words: str) -> Process:
    own = ["--port", str(port), "--quiet", "--max-prefill-delay", "0", "--no-background-compilation"]
    return Process("serve", *SIZES, *own, *words)


def total(url: str, name: str) -> float:
    """The sum of a metric's samples."""
    text = httpx.get(f"{url}/metrics", timeout=LIMIT).text
    return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)", text, re.MULTILINE)))


class Service:
    """Two servers that tell of their pages, and a router that listens."""

    def __init__(self):
        self.ports, self.events = ([free_port(), free_port()] for _ in range(2))
        self.replicas = [self.replica(i) for i in (0, 1)]
        urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        words = [word for url in urls for word in ("--replica", url)]
        words += [word for port in self.events for word in ("--kv-events", f"tcp://127.0.0.1:{port}")]
        own = ["--tokenizer", str(DEMO), "--health-period", "0.2", "--port", "0", "--page-size", "16"]
        assert all(one.url for one in self.replicas)
        self.router = Process("route", *words, *own)
        until(lambda: self.ready == 2)

    def replica(self, i: int) -> Process:
        return replica_at(self.ports[i], "--kv-events-endpoint", f"tcp://*:{self.events[i]}")

    @property
    def ready(self) -> float:
        return self.sum("replica_ready")

    def count(self, name: str) -> float:
        return self.sum(f"{name}_total")

    def sum(self, name: str) -> float:
        return total(self.router.url, f"duetto:router_{name}")


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    made = Service()
    yield made
    codes = [made.router.end(signal.SIGTERM), *(one.end(signal.SIGTERM) for one in made.replicas)]
    assert codes == [0, 0, 0], (made.router.said, [one.said for one in made.replicas])


def stream(url: str, body: dict[str, Any], came: threading.Event | None = None) -> tuple[str, str | None]:
    """The text of a stream and why it ended."""
    text, reason = "", None
    with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=LIMIT) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += event["choices"][0]["text"]
                reason = reason or event["choices"][0]["finish_reason"]
                if came is not None and len(text) > 20:
                    came.set()
    return text, reason


def whole(url: str, body: dict[str, Any]) -> tuple[str, str]:
    """The text of a whole answer and why it ended."""
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT)
    (choice,) = reply.raise_for_status().json()["choices"]
    return choice["text"], choice["finish_reason"]


def bodies(turn: int) -> list[dict[str, Any]]:
    asked = {"max_tokens": 120, "ignore_eos": True, "temperature": 0.9}
    return [asked | {"prompt": f"def f{turn}(x{i}):\n", "seed": 100 * turn + i} for i in range(6)]


@pytest.mark.parametrize("turn", range(3))
def test_answers_outlive_a_server_that_is_killed(service, turn):
    came, victim = threading.Event(), turn % 2
    url = service.router.url
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(stream, url, body, came) for body in bodies(turn)]
        asked += [pool.submit(whole, url, body) for body in bodies(turn)]
        assert came.wait(LIMIT)
        service.replicas[victim].end()
        found = [one.result(LIMIT) for one in asked]
    alive = service.replicas[1 - victim].url
    assert found == [stream(alive, body) for body in bodies(turn)] * 2
    assert service.count("resumed") > 0 and service.count("lost") >= 1
    service.replicas[victim] = service.replica(victim)
    until(lambda: service.ready == 2)


def test_prompts_are_routed_to_their_pages(service):
    before, text = service.count("hit_tokens"), "import os\n" * 60
    for i in range(4):
        httpx.post(f"{service.router.url}/v1/completions", json={"prompt": text + str(i), "max_tokens": 1})
        time.sleep(0.3)  # until its events are heard
    tokens = httpx.post(f"{service.router.url}/tokenize", json={"prompt": text}).json()["count"]
    assert service.count("hit_tokens") - before >= 3 * (tokens // 16 - 1) * 16


class Pairs:
    """Two servers that prefill, two that decode, and a router."""

    def __init__(self):
        self.prefills, self.decodes = ([free_port(), free_port()] for _ in range(2))
        self.doors = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        self.servers = [self.prefill(0), self.prefill(1), self.decode(0), self.decode(1)]

    def route(self) -> None:
        words = [word for one in self.servers[2:] for word in ("--replica", one.url)]
        for one, door in zip(self.servers, self.doors, strict=False):
            words += ["--prefill", f"{one.url}={door}"]
        own = ["--tokenizer", str(DEMO), "--health-period", "0.2", "--port", "0", "--page-size", "16"]
        self.router = Process("route", *words, *own)
        until(lambda: total(self.router.url, "duetto:router_replica_ready") == 4)

    def prefill(self, i: int) -> Process:
        return replica_at(self.prefills[i], "--kv-role", "prefill", "--kv-address", self.doors[i])

    def decode(self, i: int) -> Process:
        return replica_at(self.decodes[i], "--kv-role", "decode", "--kv-address", ",".join(self.doors))

    def computed(self) -> list[float]:
        """Tokens of prompts that each server has computed or found."""
        return [total(one.url, "vllm:prompt_tokens_total") for one in self.servers]


@pytest.fixture
def pairs() -> Iterator[Pairs]:
    made = Pairs()
    try:
        made.route()
        yield made
    finally:
        for one in made.servers:
            one.end()
    made.router.end()


def long(turn: int) -> list[dict[str, Any]]:
    texts = [f"def f{turn}(x{i}):\n" + f"    y{i} = x{i} + {turn}\n" * 8 for i in range(4)]
    asked = {"max_tokens": 60, "ignore_eos": True, "temperature": 0.9, "seed": turn}
    return [asked | {"prompt": text} for text in texts]


def test_routed_prefills_survive_the_kill_of_any_engine(pairs):
    def answers(turn: int) -> list[Any]:
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(ask, pairs.router.url, b) for ask in (stream, whole) for b in long(turn)]
            if turn:  # a prefill engine, then one that decodes
                time.sleep(0.1)
                pairs.servers[turn - 1 if turn == 1 else turn].end()
            return [one.result(LIMIT) for one in asked]

    found = [answers(0)]
    assert min(pairs.computed()) > 0
    assert total(pairs.servers[2].url, "vllm:prefix_cache_hits_total") > 0
    found += [answers(1), answers(2)]
    alone = pairs.servers[1].url  # answers whom it is asked by, too
    assert found == [[stream(alone, body) for body in long(turn)] * 2 for turn in range(3)]


class Mixed:
    """Two servers of the model that ships, one of random weights under its name, and a router."""

    def __init__(self):
        other = ("--load-format", "dummy", "--served-model-name", "demo")
        self.servers = [replica_at(free_port()), replica_at(free_port()), replica_at(free_port(), *other)]
        words = [word for one in self.servers for word in ("--replica", one.url)]
        self.router = Process("route", *words, "--health-period", "0.2", "--port", "0")
        until(lambda: total(self.router.url, "duetto:router_replica_ready") == 3)


@pytest.fixture
def mixed() -> Iterator[Mixed]:
    made = Mixed()
    yield made
    for one in [made.router, *made.servers]:
        one.end()


def parts(url: str, body: dict[str, Any], came: threading.Semaphore) -> tuple[str, str]:
    """The text of a stream and the error that it ended with; `came` counts streams with some text."""
    text = error = ""
    with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=LIMIT) as reply:
        for event in (json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")):
            error = event.get("error", {}).get("message", error)
            was_short = len(text) <= 20
            text += event["choices"][0]["text"] if "choices" in event else ""
            if was_short and len(text) > 20:
                came.release()
    return text, error


def test_no_answer_is_of_two_models(mixed):
    """A lost server's answers go on in the one of the same weights; without it streams end with an error, and
    whole answers begin anew."""
    url, count = mixed.router.url, 9
    asked = [
        {"prompt": f"def f(x{i}):\n", "seed": i, "max_tokens": 300, "ignore_eos": True, "temperature": 0.9}
        for i in range(count)
    ]
    plain = [[whole(mixed.servers[place].url, body)[0] for body in asked] for place in (0, 2)]
    assert all(one != other for one, other in zip(*plain, strict=True))
    for victim in (0, 1):
        came = threading.Semaphore(0)
        with ThreadPoolExecutor(2 * count) as pool:
            streams = [pool.submit(parts, url, body, came) for body in asked]
            wholes = [pool.submit(whole, url, body) for body in asked]
            assert all(came.acquire(timeout=LIMIT) for _ in range(count))
            mixed.servers[victim].end()
            texts, answers = ([one.result(LIMIT) for one in many] for many in (streams, wholes))
        ended = [text for text, error in texts if error]
        assert all("no other has the weights that it began with" in error for _, error in texts if error)
        for i, (text, error) in enumerate(texts):
            assert text in (plain[0][i], plain[1][i]) if not error else plain[0][i].startswith(text)
        for i, (text, _) in enumerate(answers):
            assert text in (plain[0][i], plain[1][i])
        assert bool(ended) == bool(victim)
    assert total(url, "duetto:router_resumed_total") > 0
    assert any("does not go on with another's answer" in line for line in mixed.router.said)
