"""The soak in small: its requests, its comparison with the oracle, its figures. Ten minutes of it run
with `-m minutes`."""

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from suite.fixtures import ROOT

from benchmarks.soak import __main__ as soak
from benchmarks.soak.answers import Answer, Choice
from benchmarks.soak.asks import KINDS, PATHS, ask
from benchmarks.soak.clients import Attempt, Clients
from benchmarks.soak.fleet import ENGINES, KILLED, NEVER_KILLED, ROUTERS
from benchmarks.soak.probe import in_buckets, metrics
from benchmarks.soak.proof import Proof
from benchmarks.soak.report import grown, growth, totals

TEXT = "x = load(y)\n"
WANTED = {"old": Answer({0: Choice(TEXT, [], "length")}), "new": Answer({0: Choice("z", [], "length")})}


def test_a_request_follows_from_its_seed_and_number():
    asks = [ask(3, number) for number in range(3 * len(KINDS))]
    assert asks == [ask(3, number) for number in range(len(asks))] != [ask(4, n) for n in range(len(asks))]
    assert {one.kind for one in asks} == {*KINDS} and {one.path for one in asks} == {*PATHS.values()}
    assert all(json.loads(json.dumps(one.body)) == one.body and "seed" in one.body for one in asks)
    assert [one.kind for one in asks if one.has_adapter] == ["adapted"] * 3


def test_the_deltas_of_a_stream_are_its_whole_answer():
    call = {"name": "rain", "arguments": '{"days":3}'}
    whole, streamed = Answer(), Answer()
    whole.take(
        {
            "choices": [
                {
                    "index": 0,
                    "message": {"content": None, "tool_calls": [{"id": "x", "function": call}]},
                    "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]},
                    "finish_reason": "tool_calls",
                }
            ]
        }
    )
    pieces = [
        ({"tool_calls": [{"index": 0, "id": "y", "function": {"name": "rain", "arguments": ""}}]}, -1.0),
        ({"tool_calls": [{"index": 0, "function": {"arguments": '{"days"'}}]}, -2.0),
        ({"tool_calls": [{"index": 0, "function": {"arguments": ":3}"}}]}, None),
    ]
    for delta, score in pieces:
        scores = None if score is None else {"content": [{"logprob": score}]}
        streamed.take({"choices": [{"index": 0, "delta": delta, "logprobs": scores}]})
        assert streamed.begins(whole)
    streamed.take({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    assert streamed == whole and streamed.begins(whole)


@pytest.mark.parametrize(
    "choice",
    [
        Choice(TEXT + "z"),
        Choice("y"),
        Choice(TEXT[:3], reason="length"),
        Choice("", [["rain", ""]]),
        Choice(TEXT, scores=[-1.0]),
    ],
)
def test_a_wrong_beginning_is_found(choice):
    assert not Answer({0: choice}).begins(WANTED["old"])
    assert Answer({0: Choice(TEXT[:3])}).begins(WANTED["old"])


# ---------------------------------------------------------------- clients


@dataclass
class Router:
    life: int = 1
    is_up: bool = True
    url: str = "http://router"


@dataclass
class Idle:
    """A fleet without processes."""

    router: Router = field(default_factory=Router)
    allowed: frozenset[str] = frozenset({"old"})

    @property
    def servers(self) -> dict[str, Router]:
        return dict.fromkeys(ROUTERS.values(), self.router)

    def url(self, service: str) -> str:
        return self.router.url


def events(*texts: str, reason: str | None = "length") -> str:
    choices = [{"index": 0, "text": text} for text in texts] + [
        {"index": 0, "text": "", "finish_reason": reason}
    ]
    return "".join(f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices)


DONE = "data: [DONE]\n\n"
ERROR = f"data: {json.dumps({'error': {'message': 'lost'}})}\n\n"


def verdict(
    tmp_path: Path, *replies: str | int, way: str = "read", fleet: Idle | None = None
) -> Counter[str]:
    """The counts after a request that gets these replies: the body of a stream, or a status."""
    left = list(replies)

    def reply(_: httpx.Request) -> httpx.Response:
        found = left.pop(0)
        return httpx.Response(200, text=found) if isinstance(found, str) else httpx.Response(found)

    wanted = {weights: [answer] for weights, answer in WANTED.items()}
    http = httpx.AsyncClient(transport=httpx.MockTransport(reply))
    clients = Clients(fleet or Idle(), [], wanted, tmp_path / "failures.jsonl", http=http)  # type: ignore[arg-type]
    attempt = Attempt(ask(0, 0), way, "adapters", time.monotonic(), 1 if way == "left" else None)
    asyncio.run(clients.judge(attempt))
    assert not left
    return clients.done + Counter(joined=len(clients.joined))


def test_an_answer_is_right_wrong_or_lost(tmp_path):
    assert verdict(tmp_path, events("x = ", "load(y)\n") + DONE) == {"answers": 1}
    assert verdict(tmp_path, events("x = "), way="left") == {"cut": 1}
    assert not (tmp_path / "failures.jsonl").exists()
    assert verdict(tmp_path, events("x = ", "save(y)\n") + DONE) == {"wrong": 1}
    assert verdict(tmp_path, events("z") + DONE) == {"wrong": 1}  # of weights that are not served
    assert verdict(tmp_path, events("y"), way="left") == {"wrong": 1}
    for lost in (503, events("x = ", reason=None) + ERROR, events("x = ", "load(y)\n")):
        assert verdict(tmp_path, lost) == {"lost": 1}
    failures = [json.loads(line) for line in (tmp_path / "failures.jsonl").read_text().splitlines()]
    assert [one["verdict"] for one in failures] == ["wrong"] * 3 + ["lost"] * 3
    assert failures[0]["body"] == ask(0, 0).body and failures[0]["path"] == ask(0, 0).path
    assert failures[0]["found"] == Answer({0: Choice("x = save(y)\n", [], "length")}).record()
    assert failures[0]["wanted"] == {"old": WANTED["old"].record()}


def test_failures_are_replayed_alone(tmp_path, monkeypatch, capsys):
    """The request of a failure, and what it is compared with, come from its line."""
    assert verdict(tmp_path, events("x = ", "save(y)\n") + DONE) == {"wrong": 1}

    found = dict(WANTED)

    async def alone(fleet, asks):
        assert [one.body for one in asks] == [ask(0, 0).body] and asks[0].path == ask(0, 0).path
        return {weights: [answer] for weights, answer in found.items()}

    monkeypatch.setattr(soak, "alone", alone)
    for code, text in ((0, "as wanted"), (1, "another answer")):
        assert soak.replay(tmp_path / "failures.jsonl", tmp_path) == code
        assert capsys.readouterr().out == f"line 1, old weights: {text}\n"
        found["old"] = WANTED["new"]


def test_an_answer_of_replaced_weights_is_right_during_the_replacement(tmp_path):
    """One of both is for the audit log to prove."""
    fleet = Idle(allowed=frozenset(WANTED))
    assert verdict(tmp_path, events("z") + DONE, fleet=fleet) == {"answers": 1}
    assert verdict(tmp_path, events("x = z") + DONE, fleet=fleet) == {"answers": 1, "joined": 1}


def test_a_request_is_sent_again_if_its_router_was_killed(tmp_path):
    fleet = Idle(Router(is_up=False))
    found = verdict(tmp_path, events("x = "), 503, events(TEXT) + DONE, fleet=fleet)
    assert found == {"sent again": 2, "answers": 1}


# ---------------------------------------------------------------- figures


def lines(minutes: int, leak: float) -> list[dict]:
    """Samples of processes that begin with 500 MiB and grow by `leak` MiB a minute."""
    found = []
    for second in range(10, 60 * minutes, 10):
        processes = {}
        for name in (*NEVER_KILLED, *KILLED):
            is_killed = name in KILLED
            age = second % 120 if is_killed else second
            life = 1 + second // 120 if is_killed else 1
            size = 500.0 + leak * (second / 60)
            processes[name] = {
                "life": life, "age": age, "rss_mib": size, "descriptors": 30, "threads": 20,
                "generated_tokens": 10.0 * age,
            }  # fmt: skip
        found.append({"at": float(second), "processes": processes, "clients": {"done": {}}})
    return found


def test_growth_is_found_in_killed_and_other_processes():
    flat, leaking = growth(lines(60, 0.0)), growth(lines(60, 1.0))
    assert {*flat} == {*ENGINES, *ROUTERS.values()}
    assert all(size["rss_mib"]["percent"] == 0 for size in flat.values()) and not grown(flat)
    assert {name for name, _ in grown(leaking)} == {*flat}
    assert growth(lines(1, 0.0))[KILLED[0]]["rss_mib"] is None


def test_counters_are_added_up_over_the_lives_of_a_process():
    found = totals(lines(4, 0.0))["generated_tokens"]
    assert found == 10 * (230 * len(NEVER_KILLED) + (110 + 110) * len(KILLED))


def test_metrics_are_read():
    text = 'a_total{x="1"} 2\na_total{x="2"} 3.5\nb 1e3\n# HELP b c\n'
    first = "vllm:time_to_first_token_seconds_bucket"
    text += "".join(f'{first}{{le="{le}",model_name="m"}} {n}\n' for le, n in (("0.1", 4), ("+Inf", 10)))
    sums, buckets = metrics(text)
    assert sums["a_total"] == 5.5 and sums["b"] == 1000 and buckets == {0.1: 4, float("inf"): 10}
    assert in_buckets({}, buckets, 0.4) == 0.1 and in_buckets({}, buckets, 0.5) == float("inf")
    assert in_buckets(buckets, buckets, 0.5) is None


def test_a_log_is_proved_by_both_sets_of_weights_together():
    def record(*lines: int, reason: str = "3 of 3 tokens were made by other weights") -> dict:
        others = [{"line": line, "reasons": [reason], "differences": []} for line in lines]
        return {
            "requests": 3, "altered": [], "broken": [], "cut_off": [], "not_provable": others,
        }  # fmt: skip

    assert not Proof.of([record(2), record(3, 4)]).failure
    assert Proof.of([record(2), record(2, 3)]).failure
    parts = [record(2, reason=f"{n} of 3 tokens were made by other weights") for n in (1, 2)]
    assert not Proof.of(parts).failure and Proof.of([parts[1], parts[1]]).failure
    assert Proof.of([record(2, reason="other versions"), record(3, 4)]).failure
    assert Proof.of([record(2) | {"altered": [{"line": 3}]}, record(3, 4)]).failure
    assert Proof.of([record(2), record(3, 4) | {"broken": [{"line": 4}]}]).failure


@pytest.mark.minutes
def test_ten_minutes_of_kills_cost_no_answer(tmp_path):
    output = tmp_path / "soak.json"
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", "10", "--seed", "1"]
    command += ["--output", str(output), "--folder", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads(output.read_text())
    assert found["violations"] == [] and found["answers"]["wrong"] == found["answers"]["lost"] == 0
    assert found["faults"]["kills"] >= 10 and found["answers"]["answers"] > 500
    assert found["totals"]["resumed"] > 0 and output.with_suffix(".svg").exists()
