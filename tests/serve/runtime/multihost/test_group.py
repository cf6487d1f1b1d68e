"""What ranks tell each other, and how one that is lost is noticed."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from duetto.serve.host.sockets.handshake import Handshake, HandshakeRejected
from duetto.serve.host.sockets.message_link import Link
from duetto.serve.options.engine import EngineOptions
from duetto.serve.runtime.multihost import group as groups
from duetto.serve.runtime.multihost import rendezvous, supervisor
from duetto.serve.runtime.multihost.group import ProcessGroup
from duetto.serve.runtime.multihost.messages import GROUP_DECODER, Beat, End, Order
from duetto.serve.runtime.multihost.supervisor import (
    LOST_EXIT_CODE,
    free_port,
    gpu_environment,
    supervise,
    wait_for_children,
)

SOON = 60.0  # seconds in which a thread must have noticed


def soon(holds: Callable[[], bool]) -> None:
    """Wait until it holds."""
    until = time.monotonic() + SOON
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.fixture
def linked():
    """Makes pairs of ends, which are closed after the test."""
    made: list[Link] = []

    def link(seconds: float = SOON) -> tuple[Link, Link]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            first = socket.create_connection(server.getsockname())
            second, _ = server.accept()
        made.extend((Link(first, seconds, GROUP_DECODER), Link(second, seconds, GROUP_DECODER)))
        return made[-2], made[-1]

    yield link
    for end in made:
        end.close()


def test_messages_arrive_as_they_were_sent(linked):
    ours, theirs = linked()
    like = {"a": jax.ShapeDtypeStruct((2, 3), np.int32), "b": (jax.ShapeDtypeStruct((), np.float32), None)}
    given = {"a": np.arange(6, dtype=np.int32).reshape(2, 3), "b": (np.float32(0.5), None)}
    sent = [
        Handshake({"jax": "1"}, 1),
        Order.from_tree("run", "prefill[2,1]", given, {"pooled": 0}),
        Beat(7),
        HandshakeRejected("no"),
        End(),
    ]
    for message in sent:
        ours.send(message)
    received = [theirs.receive() for _ in sent]
    assert received == sent
    order = received[1]
    assert isinstance(order, Order) and order.prompt_results == ("pooled",)
    found = order.unflatten(like)
    np.testing.assert_array_equal(found["a"], given["a"])
    assert found["b"] == given["b"] and found["a"].dtype == np.int32
    ours.close()
    with pytest.raises(EOFError):
        theirs.receive()


@dataclass
class Lost:
    said: list[tuple[str, int]]
    heard: threading.Event

    def __call__(self) -> tuple[str, int]:
        assert self.heard.wait(SOON)
        return self.said[0]


@pytest.fixture
def lost(monkeypatch):
    """What groups say instead of ending the process, as it comes."""
    said: list[tuple[str, int]] = []
    heard = threading.Event()

    def end_process(code: int, why: str = "") -> None:
        said.append((why, code))
        heard.set()

    monkeypatch.setattr(groups, "end_process", end_process)
    return Lost(said, heard)


@pytest.fixture
def pair(linked):
    """Makes rank 0 of two, and the other's end."""
    made: list[ProcessGroup] = []

    def group(seconds: float = SOON) -> tuple[ProcessGroup, Link]:
        ours, theirs = linked(seconds)
        made.append(ProcessGroup(0, 2, [ours], seconds))
        return made[-1], theirs

    yield group
    for one in made:
        one.has_ended = True


def test_a_rank_that_ends_is_lost(lost, pair):
    _, other = pair()
    other.close()
    assert lost() == ("rank 0 ends: rank 1 has ended", LOST_EXIT_CODE)


def test_a_silent_rank_is_lost(lost, pair):
    _, other = pair(0.2)
    assert lost() == ("rank 0 ends: rank 1 has said nothing for 0.2 s", LOST_EXIT_CODE)
    other.close()


@pytest.fixture
def clock(monkeypatch):
    """The time that groups look at, which passes when a test says so."""
    now, looks = 0.0, 0

    def sleep(_: float) -> None:
        nonlocal looks
        looks += 1
        time.sleep(0.001)

    def passes(seconds: float) -> None:
        """And groups have looked since."""
        nonlocal now
        now += seconds
        before = looks
        soon(lambda: looks > before + 1)

    monkeypatch.setattr(groups, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    return passes


def test_a_rank_that_does_no_order_is_lost(lost, pair, clock):
    ours, other = pair()
    ours.broadcast(Order("empty"))
    other.send(Beat(0))
    clock(SOON + 1)
    assert lost() == (f"rank 0 ends: rank 1 has done no order for {SOON:g} s", LOST_EXIT_CODE)


def test_a_rank_that_is_always_one_order_behind_is_not(lost, pair, clock):
    ours, other = pair()
    for done in range(10):
        ours.broadcast(Order("empty"))
        clock(SOON / 2)
        other.send(Beat(done))
        soon(lambda done=done: ours._progress[1][0] == done)
    assert not lost.said


def test_an_error_of_one_rank_ends_all_ranks(lost, pair):
    _, other = pair()
    other.send(HandshakeRejected("no such folder"))
    assert lost() == ("rank 0 ends: rank 1: no such folder", 1)


def test_a_device_that_fails_loses_the_group(lost, pair, monkeypatch):
    """An error of one's own would end a batch for good; a device's is that of a rank that was lost."""
    monkeypatch.setattr(groups, "CAUSE_SECONDS", 0.0)
    ours, _ = pair()
    ours.fail_group(jax.errors.JaxRuntimeError("out of memory"))
    assert lost() == ("rank 0 ends: a program failed: out of memory", LOST_EXIT_CODE)


def test_a_group_has_one_llm(pair, monkeypatch):
    ours, _ = pair()
    monkeypatch.setattr(rendezvous, "_GROUP", [ours])
    assert rendezvous.join_group(
        EngineOptions(nnodes=2)
    ).use_tqdm_on_load  # a command has met already, for its LLM
    ours.is_serving = True
    with pytest.raises(ValueError, match="nnodes 2 is not allowed: a group of processes has one LLM"):
        rendezvous.join_group(EngineOptions(nnodes=2))


def test_orders_come_until_the_end(linked):
    ours, theirs = linked()
    left = []
    leader, follower = ProcessGroup(0, 2, [ours], SOON), ProcessGroup(1, 2, [theirs], SOON)
    for rank, group in enumerate((leader, follower)):
        group.shutdown = partial(left.append, rank)
    leader.is_serving = follower.is_serving = True
    orders = [Order("assign_slot"), Order("empty")]
    for order in orders:
        leader.broadcast(order)
    leader.end_group()
    leader.end_group()
    assert list(follower.receive_orders()) == orders
    assert sorted(left) == [0, 1]


# ---------------------------------------------------------------- children


def child(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code])


@pytest.mark.parametrize(
    "codes, expected",
    [
        (("0", "0"), 0),
        (("75", "75"), LOST_EXIT_CODE),
        (("1", "75"), 1),
        (("75", "1"), 1),
        (("130", "0"), 130),
        (("os.kill(os.getpid(), 9)", "75"), LOST_EXIT_CODE),
        (("0", "75"), 0),  # all answers are there
    ],
)
def test_ranks_have_one_exit_code(codes: tuple[str, str], expected: int, monkeypatch):
    monkeypatch.setattr(supervisor, "END_GRACE_SECONDS", SOON)
    assert wait_for_children([child(f"import os, sys; sys.exit({code})") for code in codes]) == expected


def test_a_rank_that_hangs_is_killed(monkeypatch):
    monkeypatch.setattr(supervisor, "END_GRACE_SECONDS", 0.5)
    codes = ["75", "time.sleep(9999)"]
    ranks = [child(f"import sys, time; sys.exit({code})") for code in codes]
    assert wait_for_children(ranks) == LOST_EXIT_CODE


def test_a_lost_group_starts_again_while_answers_come(monkeypatch, capfd):
    answers, starts = [0], []

    def run(*_: object) -> int:
        starts.append(1)
        answers[0] += len(starts) == 3
        return LOST_EXIT_CODE

    monkeypatch.setattr(supervisor, "run_ranks", run)
    assert supervise([], 2, None, lambda: answers[0]) == LOST_EXIT_CODE
    assert len(starts) == 3 - 1 + supervisor.MAX_LOST_STARTS
    assert "5 starts in a row were lost without an answer" in capfd.readouterr().err
    starts.clear()
    assert supervise([], 2, None, None) == LOST_EXIT_CODE and len(starts) == 1


def test_ranks_of_one_machine_share_its_gpus(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv(supervisor.GPUS_VARIABLE, "0,2,4,6")
    assert [gpu_environment(i, 2)[supervisor.GPUS_VARIABLE] for i in range(2)] == ["0,2", "4,6"]
    assert gpu_environment(0, 1) == {}
    with pytest.raises(ValueError, match="nnodes 3 is not allowed: they cannot share 4 GPUs evenly"):
        gpu_environment(0, 3)


def test_a_terminated_command_does_not_restart(monkeypatch):
    """While its ranks cannot answer a signal yet."""

    def wait(ranks: list[subprocess.Popen[bytes]]) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return wait_for_children(ranks)

    monkeypatch.setattr(supervisor, "start_child", lambda *_: child("import time; time.sleep(9999)"))
    monkeypatch.setattr(supervisor, "wait_for_children", wait)
    assert supervise([], 2, 0, lambda: 0) == 128 + signal.SIGTERM


def test_a_free_port_has_a_free_neighbour():
    port = free_port()
    for number in (port, port + 1):
        with socket.socket() as own:
            own.bind(("127.0.0.1", number))
