"""Prefill and decode in two servers, either of which may be killed at any moment."""

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import pytest
from fakes.handover import soon

from duetto.serve.processes.supervisor import free_port

SMALL = ["--max-batched-token-mem", "1024", "--quiet"]  # the least recently used pages are soon written over
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
                    time.sleep(0.05)
                else:
                    self.done["right" if found == self.wanted[i] else "WRONG"] += 1
                    self.answered.add(i)


def serve_apart(starting, kills: int) -> Clients:
    """Answers of two servers, of which one in turn is killed so many times, beside those of one."""
    alone = starting(*SMALL)
    with httpx.Client(base_url=alone.url, timeout=PATIENCE) as http:
        wanted = [answer(http, asked(i)) for i in range(40)]
    alone.stop()
    place, port = f"127.0.0.1:{free_port()}", str(free_port())
    roles = {
        "prefill": [*SMALL, "--kv-role", "prefill", "--kv-address", place],
        "decode": [*SMALL, "--kv-role", "decode", "--kv-address", place, "--port", port],
    }
    sides = {role: starting(*words) for role, words in roles.items()}
    clients, chance = Clients(sides["decode"].url, wanted), random.Random(0)
    threads = clients.begin()
    for _ in range(kills):
        before = clients.done["right"]
        soon(lambda before=before: clients.done["right"] >= before + BETWEEN)
        time.sleep(chance.random() / 4)
        role = chance.choice(list(roles))
        sides[role].process.kill()
        sides[role].ended()
        sides[role] = starting(*roles[role])
    soon(lambda: len(clients.answered) == len(wanted))
    assert sides["prefill"].gauges()["vllm:prompt_tokens_total"] > 0
    clients.over.set()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    return clients


@pytest.mark.minutes
def test_requests_survive_fifty_kills_of_either_side(starting):
    """Each ends with one engine's tokens, or with an error that a retry mends."""
    done = serve_apart(starting, 50).done
    print(dict(done))
    assert done["WRONG"] == 0 and done["right"] > 300
