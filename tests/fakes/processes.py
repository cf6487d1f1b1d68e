"""Processes that start with everything imported: half of a short process's time is imports."""

import atexit
import os
import runpy
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from subprocess import TimeoutExpired
from typing import Any

import jax
from suite.strict import STRICT

from duetto.__main__ import main

FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "fakes.processes", "duetto.serve.cli.batch", "duetto.serve.cli.serve", "duetto.serve.jobs.batch.run",
        "duetto.serve.jobs.batch.job", "duetto.serve.llm.llm", "duetto.serve.llm.disaggregated",
        "duetto.serve.server.http.main",
    ]
)  # fmt: skip


class Forked:
    """A process that runs a function, as a `Popen` whose streams are pipes; those that `heard` does not name
    are dropped. Its environment is the one at the start, with `more`."""

    def __init__(
        self,
        target: Callable[..., Any],
        *arguments: Any,
        heard: Sequence[str] = ("stdout", "stderr"),
        more: Mapping[str, str] = {},
    ):
        pipes = {name: FORKS.Pipe(duplex=False) for name in heard}
        ends = {name: own for name, (_, own) in pipes.items()}
        given = target, arguments, ends, {**os.environ, **more}
        self.process = FORKS.Process(target=run, args=given, daemon=True)
        self.process.start()
        for own in ends.values():
            own.close()
        streams = {name: os.fdopen(os.dup(own.fileno())) for name, (own, _) in pipes.items()}
        self.stdout, self.stderr = streams.get("stdout"), streams.get("stderr")

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise TimeoutExpired("a forked process", timeout or 0.0)
        return self.process.exitcode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it writes until its end. Raises TimeoutExpired once it is killed."""
        assert self.stdout is not None and self.stderr is not None
        with self.stdout as out, self.stderr as err, ThreadPoolExecutor(2) as pool:
            told = pool.submit(out.read), pool.submit(err.read)
            try:
                self.wait(timeout)
            finally:
                self.kill()
            return told[0].result(), told[1].result()


def run(target: Callable[..., Any], arguments: Sequence[Any], ends: Mapping[str, Any], env: Any) -> None:
    """Run a function as the main program of a process."""
    os.environ.clear()
    os.environ.update(env)
    for name in STRICT.keys() & env.keys():
        jax.config.update(name.lower(), env[name])  # jax has read its environment
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(ends[name].fileno() if name in ends else os.open(os.devnull, os.O_WRONLY), number)
        if name in ends:
            ends[name].close()
    try:
        target(*arguments)
    finally:
        atexit._run_exitfuncs()  # which processes of `multiprocessing` do not call


def script(path: str, *arguments: str) -> None:
    """Run a Python file with these arguments."""
    sys.argv[:] = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


def command(*arguments: str) -> None:
    """Run `duetto` with these arguments."""
    sys.argv[:] = ["duetto", *arguments]
    sys.exit(main())
