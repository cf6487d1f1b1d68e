"""Supervisor of a group: it runs the ranks as child processes, and restarts them if the group is lost."""

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

from ...host.streams import print_stderr

PIPE_VARIABLE = "DUETTO_SUPERVISED"  # environment variable of a child: the descriptor of its end of a pipe
# Environment variable of a child: a part of the key, equal for all ranks of a start.
TOKEN_VARIABLE = "DUETTO_GROUP"
LOST_EXIT_CODE = 75  # exit code of a process whose group is lost: EX_TEMPFAIL of sysexits.h
MAX_LOST_STARTS = 5  # number of starts in a row that may be lost without an answer
END_GRACE_SECONDS = 10.0  # seconds that the other ranks have to end after one has failed
CHILD_POLL_SECONDS = 0.05  # seconds between two polls of the children
GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"


def has_supervisor() -> bool:
    """Return True if this process has a supervisor."""
    return PIPE_VARIABLE in os.environ


def supervise(
    command: Sequence[str], nnodes: int, rank: int | None, progress: Callable[[], int] | None
) -> int:
    """Run a command in `nnodes` processes on this machine, or one `rank` of them; returns the exit code.

    A lost run is started again, unless `progress` is None or `MAX_LOST_STARTS` runs were lost in a row
    without progress. `progress` returns the number of results that are kept of lost runs. On several machines
    rank 0's supervisor decides, and the other supervisors follow it.
    """
    num_failed, last_progress = 0, progress() if progress else 0
    while True:
        code = run_ranks(command, nnodes, rank)
        if code != LOST_EXIT_CODE or progress is None:
            return code
        num_failed, last_progress = (
            (num_failed + 1, last_progress) if progress() == last_progress else (1, progress())
        )
        if num_failed == MAX_LOST_STARTS and not rank:
            print_stderr(f"duetto: {MAX_LOST_STARTS} starts in a row were lost without an answer")
            return code
        print_stderr("duetto: the processes start again")


def run_ranks(command: Sequence[str], nnodes: int, rank: int | None) -> int:
    """Start the ranks once, and wait for all of them. Returns the exit code: `LOST_EXIT_CODE` if a rank was
    lost, 128 plus the signal's number if it was lost after a signal to this process."""
    ranks, token = [[*command]], {}
    if rank is None:
        coordinator = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        ranks = [[*command, "--node-rank", str(i), *coordinator] for i in range(nnodes)]
        token = {TOKEN_VARIABLE: secrets.token_hex(16)}
    with open_liveness_pipe() as pipe_end:
        children = [start_child(argv, pipe_end, i, len(ranks), token) for i, argv in enumerate(ranks)]
        with forward_signals(children[0], rank) as signals:
            code = wait_for_children(children)
    return 128 + signals[0] if signals and code == LOST_EXIT_CODE else code


@contextmanager
def open_liveness_pipe() -> Iterator[int]:
    """Open a pipe whose other end closes when this process ends: children that watch the pipe then end too.
    Yields the children's end."""
    child_end, own_end = os.pipe()
    try:
        yield child_end
    finally:
        os.close(child_end)
        os.close(own_end)


def start_child(
    argv: Sequence[str], pipe_end: int, index: int, count: int, token: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start the i-th of `count` children. Only the first has the standard streams. `pipe_end`: its end of the
    pipe."""
    quiet = subprocess.DEVNULL if index else None
    environment = os.environ | gpu_environment(index, count) | token | {PIPE_VARIABLE: str(pipe_end)}
    module = [sys.executable, "-m", "duetto", *argv]
    return subprocess.Popen(
        module, env=environment, stdin=quiet, stdout=quiet, pass_fds=[pipe_end], start_new_session=index > 0
    )


def gpu_environment(index: int, count: int) -> dict[str, str]:
    """Return the environment that limits the i-th of `count` processes to its share of the machine's NVIDIA
    GPUs. Raises ValueError if the GPUs cannot be shared evenly."""
    if count == 1 or os.environ.get("JAX_PLATFORMS") == "cpu":
        return {}
    device_numbers = sorted(
        (path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")), key=int
    )
    gpus = [name for name in os.environ.get(GPUS_VARIABLE, ",".join(device_numbers)).split(",") if name]
    gpus_per_process, remainder = divmod(len(gpus), count)
    if remainder:
        raise ValueError(f"nnodes {count} is not allowed: they cannot share {len(gpus)} GPUs evenly")
    return (
        {GPUS_VARIABLE: ",".join(gpus[index * gpus_per_process : (index + 1) * gpus_per_process])}
        if gpus_per_process
        else {}
    )


def wait_for_children(children: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all children. Returns 0 if the first succeeded, else the first exit code that is neither
    `LOST_EXIT_CODE` nor from a signal; `LOST_EXIT_CODE` if there is none."""
    while not (ended := [child for child in children if child.poll() is not None]):
        time.sleep(CHILD_POLL_SECONDS)
    deadline = time.monotonic() + END_GRACE_SECONDS
    failed = any(child.returncode for child in ended)
    for child in children:
        try:
            child.wait(max(deadline - time.monotonic(), 0) if failed else None)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    codes = [child.returncode for child in children]
    if codes[0] == 0:
        return 0
    child_errors = [code for code in codes if code > 0 and code != LOST_EXIT_CODE]
    return child_errors[0] if child_errors else LOST_EXIT_CODE


@contextmanager
def forward_signals(child: subprocess.Popen[bytes], rank: int | None) -> Iterator[list[int]]:
    """Forward SIGTERM to a child. The terminal sends Ctrl-C to its processes, and only rank 0 acts on it.
    Yields a list of the signals that this process has received."""
    signals: list[int] = []

    def on_signal(number: int, _: object) -> None:
        signals.append(number)
        if rank or number == signal.SIGTERM:
            child.terminate()

    old_handlers = [(number, signal.signal(number, on_signal)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield signals
    finally:
        for number, handler in old_handlers:
            signal.signal(number, handler)


def free_port() -> int:
    """Return a free port of this machine, of which the next port is free too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def end_with_supervisor() -> None:
    """End this process when its supervisor ends; do nothing without a supervisor."""

    def watch_pipe() -> None:
        os.read(int(os.environ[PIPE_VARIABLE]), 1)
        end_process(LOST_EXIT_CODE, "the process that started this one has ended")

    if has_supervisor():
        threading.Thread(target=watch_pipe, name="duetto-supervisor-watcher", daemon=True).start()


def end_process(code: int, reason: str = "") -> NoReturn:
    """End this process from any thread, and print the reason if it is not empty."""
    if reason:
        print_stderr(f"duetto: {reason}")
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    os._exit(code)
