"""Supervisor of a group: runs its ranks as child processes and restarts them when the group is lost."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from ...host.streams import tell

SUPERVISED = "DUETTO_SUPERVISED"  # in a child's environment: the number of its end of a pipe
TOKEN = "DUETTO_GROUP"  # likewise: a part of the key, of the ranks of one start
LOST = 75  # exit code of a process whose group is lost: EX_TEMPFAIL of sysexits.h
STARTS = 5  # in a row that may fail without an answer between them
GRACE = 10.0  # seconds that the other ranks have to end when one has
PAUSE = 0.05  # seconds between two looks at the children
VISIBLE = "CUDA_VISIBLE_DEVICES"


def is_supervised() -> bool:
    return SUPERVISED in os.environ


def supervise(
    command: Sequence[str], nnodes: int, rank: int | None, progress: Callable[[], int] | None
) -> int:
    """Run a command in `nnodes` processes on this machine, or as one `rank` of them; returns the exit code.

    `progress` counts the results that are kept of a run that is lost, which is then started again; without
    `progress` it is not. On several machines rank 0's supervisor decides, and the others follow it.
    """
    failed, kept = 0, progress() if progress else 0
    while True:
        code = run(command, nnodes, rank)
        if code != LOST or progress is None:
            return code
        failed, kept = (failed + 1, kept) if progress() == kept else (1, progress())
        if failed == STARTS and not rank:
            tell(f"duetto: {STARTS} starts in a row were lost without an answer")
            return code
        tell("duetto: the processes start again")


def run(command: Sequence[str], nnodes: int, rank: int | None) -> int:
    """Start the ranks once and wait for all. Returns LOST where one was lost, 128 plus the signal's number
    where this process got one."""
    ranks, token = [[*command]], {}
    if rank is None:
        where = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        ranks = [[*command, "--node-rank", str(i), *where] for i in range(nnodes)]
        token = {TOKEN: secrets.token_hex(16)}
    with leash() as held:
        children = [start(argv, held, i, len(ranks), token) for i, argv in enumerate(ranks)]
        with forwarding(children[0], rank) as heard:
            code = wait(children)
    return 128 + heard[0] if heard and code == LOST else code


@contextmanager
def leash() -> Iterator[int]:
    """Open a pipe whose other end closes with this process: children that watch it end then."""
    theirs, ours = os.pipe()
    try:
        yield theirs
    finally:
        os.close(theirs)
        os.close(ours)


def start(
    argv: Sequence[str], held: int, i: int, count: int, token: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start the i-th of `count` children; only the first has the standard streams."""
    quiet = subprocess.DEVNULL if i else None
    environment = os.environ | share(i, count) | token | {SUPERVISED: str(held)}
    module = [sys.executable, "-m", "duetto", *argv]
    return subprocess.Popen(
        module, env=environment, stdin=quiet, stdout=quiet, pass_fds=[held], start_new_session=i > 0
    )


def share(i: int, count: int) -> dict[str, str]:
    """Return the environment that shows the i-th of `count` processes its share of the machine's NVIDIA GPUs.
    Raises ValueError where they cannot be shared evenly."""
    if count == 1 or os.environ.get("JAX_PLATFORMS") == "cpu":
        return {}
    found = sorted((path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")), key=int)
    gpus = [name for name in os.environ.get(VISIBLE, ",".join(found)).split(",") if name]
    each, left = divmod(len(gpus), count)
    if left:
        raise ValueError(f"nnodes {count} is not allowed: they cannot share {len(gpus)} GPUs evenly")
    return {VISIBLE: ",".join(gpus[i * each : (i + 1) * each])} if each else {}


def wait(children: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all children. Returns 0 where the first ended well, else the first exit code that is an error
    of a child's own; LOST where there is none."""
    while not (ended := [child for child in children if child.poll() is not None]):
        time.sleep(PAUSE)
    until = time.monotonic() + GRACE
    failed = any(child.returncode for child in ended)
    for child in children:
        try:
            child.wait(max(until - time.monotonic(), 0) if failed else None)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    codes = [child.returncode for child in children]
    if codes[0] == 0:
        return 0
    own = [code for code in codes if code > 0 and code != LOST]
    return own[0] if own else LOST


@contextmanager
def forwarding(child: subprocess.Popen[bytes], rank: int | None) -> Iterator[list[int]]:
    """Forward SIGTERM to a child. Ctrl-C reaches the terminal's processes without that, and only rank 0 acts
    on it. Yields a list of the signals that arrived."""
    heard: list[int] = []

    def note(number: int, _: object) -> None:
        heard.append(number)
        if rank or number == signal.SIGTERM:
            child.terminate()

    before = [(number, signal.signal(number, note)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield heard
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def free_port() -> int:
    """Find a free port of this machine whose next one is free too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def follow_supervisor() -> None:
    """End this process as soon as its supervisor has ended, if it has one."""

    def watch() -> None:
        os.read(int(os.environ[SUPERVISED]), 1)
        end_process(LOST, "the process that started this one has ended")

    if is_supervised():
        threading.Thread(target=watch, name="duetto-supervised", daemon=True).start()


def end_process(code: int, why: str = "") -> NoReturn:
    """End this process from any thread, and print the reason where there is one."""
    if why:
        tell(f"duetto: {why}")
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    os._exit(code)
