"""Cost of compiling a grammar, measured in a child process that can be killed."""

import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .vocabulary import TokenBytes

Process = subprocess.Popen[bytes]
CHILD_SCRIPT = Path(__file__).with_name("child.py")


class ProbeStopped(Exception):
    """The child process ended before it reported."""


@dataclass(frozen=True)
class CompileLimits:
    """Limits for compiling one grammar: processor seconds, bytes, and the niceness of the process."""

    seconds: float
    bytes: int
    nice: int = 0


@dataclass(frozen=True)
class CompileCost:
    """Cost of compiling a grammar: bytes at the peak, llguidance's error, the signal that ended the process,
    if one did, and the translation of GBNF to Lark."""

    bytes: int
    error: str
    signal: int
    lark: str

    @property
    def is_too_long(self) -> bool:
        return self.signal == signal.SIGPROF

    @property
    def is_too_large(self) -> bool:
        """True if an allocation failed, or the system ran out of memory."""
        return self.signal in (signal.SIGABRT, signal.SIGKILL)


class CompileProbe:
    """Compiles one grammar at a time in a child process, which starts with the first grammar."""

    def __init__(self, parser_limits: Mapping[str, int]):
        self._parser_limits = dict(parser_limits)
        self._lock = threading.Lock()  # of `_running`
        self._running: tuple[Process, weakref.finalize] | None = None

    def try_compile(self, token_bytes: TokenBytes, text: str, limits: CompileLimits) -> CompileCost:
        """Compile a grammar, and return its cost. Raises ProbeStopped if the process was stopped meanwhile,
        or cannot run."""
        try:
            process = self._ensure_process(token_bytes)
            return exchange_messages(process, {"text": text, "limits": self._parser_limits} | vars(limits))
        except (OSError, EOFError, ValueError, pickle.UnpicklingError):
            self.stop()
            raise ProbeStopped from None

    def stop(self) -> None:
        """Kill the process; the next grammar starts another one."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running[1]()

    def _ensure_process(self, token_bytes: TokenBytes) -> Process:
        with self._lock:
            if self._running is not None:
                return self._running[0]
            process = start_compile_process()
            self._running = process, weakref.finalize(self, kill_process, process)
        exchange_messages(
            process,
            {
                "tokens": token_bytes.tokens,
                "special": token_bytes.special_token_ids,
                "ends": token_bytes.eos_ids,
            },
        )
        return process


def start_compile_process() -> Process:
    """Start a child process in a group of its own, which gets no signal of a terminal."""
    spec = importlib.util.find_spec("llguidance")
    assert spec is not None and spec.origin is not None
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(CHILD_SCRIPT), str(Path(spec.origin).parents[1])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def exchange_messages(process: Process, message: Mapping[str, Any]) -> CompileCost:
    """Send an order to a process, and return its report."""
    assert process.stdin is not None and process.stdout is not None
    pickle.dump(message, process.stdin)
    process.stdin.flush()
    return CompileCost(**pickle.load(process.stdout))


def kill_process(process: Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in filter(None, (process.stdin, process.stdout)):
        with suppress(OSError):
            pipe.close()
