"""Prefill and decode in two servers, either of which may be killed at any moment."""

import random
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fakes.handover import soon
from fakes.processes import Forked, command

from duetto.serve.runtime.multihost.supervisor import free_port

SMALL = [
    "--max-num-seqs", "4", "--max-prefill-tokens", "32", "--max-model-len", "256", "--page-size", "16",
    "--max-prefill-delay", "0", "--no-background-compilation", "--quiet",
    "--max-batched-token-mem", "1024",  # the least recently used pages are soon written over
]  # fmt: skip
CLIENTS, BETWEEN, PATIENCE = 4, 6, 300.0  # answers between two kills; seconds for them


def asked(i: int) -> dict[str, Any]:
    prompt = np.random.default_rng(i).integers(3, 250, 20 + 4 * i).tolist()
    sampling = {"temperature": 0.0} if i % 2 else {"temperature": 0.9, "seed": i}
    return sampling | {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, "logprobs": 1}


def answer(http: httpx.Client, body: dict[str, Any]) -> tuple[str, list[float]]:
    """A text, and the log-probabilities of its tokens. Raises httpx.HTTPError for what a retry mends."""
    response = http.post("/v1/completions", json=body)
    response.raise_for_status()
    (choice,) = response.json()["choices"]
    return choice["text"], choice["logprobs"]["token_logprobs"]


@dataclass
class Clients:
    """Ask a server for one thing after the other, and again where that failed."""

    url: str
    wanted: Sequence[tuple[str, list[float]]]
    done: Counter[str] = field(default_factory=Counter)
    answered: set[int] = field(default_factory=set)
    over: threading.Event = field(default_factory=threading.Event)

    def begin(self) -> list[threading.Thread]:
        threads = [threading.Thread(target=self.work, args=(i,), daemon=True) for i in range(CLIENTS)]
        for thread in threads:
            thread.start()
        return threads

    def work(self, number: int) -> None:
        chance = random.Random(number)
        with httpx.Client(base_url=self.url, timeout=PATIENCE) as http:
            while not self.over.is_set():
                i = chance.randrange(len(self.wanted))
                try:
                    found = answer(http, asked(i))
                except httpx.HTTPError as error:
                    self.done[type(error).__name__] += 1
                    time.sleep(0.2)
                else:
                    self.done["right" if found == self.wanted[i] else "WRONG"] += 1
                    self.answered.add(i)


@dataclass
class Server:
    """One that is killed again and again: forked from a process that has imported all it needs."""

    words: list[str]
    port: int = field(default_factory=free_port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> "Server":
        words = [*SMALL, "--port", str(self.port), *self.words]
        self.process = Forked(command, "serve", *words, heard=[])
        soon(self.is_ready)
        return self

    def is_ready(self) -> bool:
        """Whether it listens, which it does once it is ready."""
        assert self.process.poll() is None
        try:
            socket.create_connection(("127.0.0.1", self.port), PATIENCE).close()
        except OSError:
            time.sleep(0.1)
            return False
        return True

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def serve_apart(kills: int, folder: Path) -> Clients:
    """Answers of two servers with a key, of which one in turn is killed, beside those of one."""
    alone = Server([]).start()
    with httpx.Client(base_url=alone.url, timeout=PATIENCE) as http:
        wanted = [answer(http, asked(i)) for i in range(40)]
    alone.kill()
    key, port = folder / "key", free_port()
    key.write_text(16 * "k")
    key.chmod(0o600)
    sides = {
        role: Server(
            ["--kv-role", role, "--kv-address", f"{host}:{port}", "--cluster-key-file", str(key)]
        ).start()
        for role, host in {"prefill": "0.0.0.0", "decode": "127.0.0.1"}.items()
    }
    try:
        return killed(sides, Clients(sides["decode"].url, wanted), kills)
    finally:
        for side in sides.values():
            side.kill()


def killed(sides: dict[str, Server], clients: Clients, kills: int) -> Clients:
    threads, chance = clients.begin(), random.Random(0)
    for _ in range(kills):
        before = clients.done["right"]
        soon(lambda before=before: clients.done["right"] >= before + BETWEEN)
        time.sleep(chance.random() / 4)
        side = sides[chance.choice(list(sides))]
        side.kill()
        side.start()
    soon(lambda: len(clients.answered) == len(clients.wanted))
    soon(lambda: computed(sides["prefill"]) > 0)
    clients.over.set()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    return clients


def computed(side: Server) -> float:
    """Tokens of prompts."""
    counts = httpx.get(f"{side.url}/metrics", timeout=PATIENCE).text
    return sum(map(float, re.findall(r"^vllm:prompt_tokens_total{.*} (\S+)", counts, re.MULTILINE)))


@pytest.mark.minutes
def test_requests_survive_fifty_kills_of_either_side(tmp_path):
    """Each ends with one engine's tokens, or with an error that a retry mends."""
    done = serve_apart(50, tmp_path).done
    print(dict(done))
    assert done["WRONG"] == 0 and done["right"] > 300
