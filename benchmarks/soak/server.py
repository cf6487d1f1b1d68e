"""A server of the fleet: a process as users start it, which is killed and started again under its port."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from duetto.serve.runtime.multihost.supervisor import free_port

STARTING = 600.0  # seconds that a process may take to start: a loaded machine is no fault
STOPPING = 120.0  # seconds that a drain may take
LINGERING = 10.0  # seconds in which the children of a killed process end


@dataclass
class Server:
    """A process and its successors.

    words: returns the command's words of the next start
    log: file of what all of them have written
    life: number of starts so far
    begun: time of the last start
    """

    name: str
    words: Callable[[], list[str]]
    log: Path
    port: int = field(default_factory=free_port)
    life: int = 0
    begun: float = 0.0
    is_up: bool = False
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    async def start(self, http: httpx.AsyncClient) -> None:
        """Start the process and wait until it accepts requests. Raises RuntimeError if it ends before."""
        process = self._launch()
        while not await self.is_ready(http):
            if process.poll() is not None or time.monotonic() - self.begun > STARTING:
                raise RuntimeError(f"{self.name} does not start: {tail(self.log)}")
            await asyncio.sleep(0.1)
        self.is_up = True

    def _launch(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "duetto", *self.words(), "--port", str(self.port)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=log, start_new_session=True)
        self.life, self.begun = self.life + 1, time.monotonic()
        return self.process

    async def is_ready(self, http: httpx.AsyncClient) -> bool:
        try:
            return (await http.get(f"{self.url}/ready", timeout=5.0)).status_code == 200
        except httpx.TransportError:
            return False

    async def kill(self) -> list[int]:
        """Kill the process alone, and return its children."""
        assert self.process is not None
        self.is_up, children = False, descendants(self.pid)
        self.process.kill()
        await asyncio.to_thread(self.process.wait)
        return children

    async def stop(self) -> int:
        """Drain the process, and return its exit code."""
        assert self.process is not None
        self.process.terminate()
        try:
            return await asyncio.to_thread(self.process.wait, STOPPING)
        except subprocess.TimeoutExpired:
            return -1
        finally:
            self.process.kill()


def descendants(pid: int) -> list[int]:
    """Return the children of a process, and theirs."""
    parents = {int(entry): parent(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()}
    found = [pid]
    for one in found:  # grows
        found += [child for child, own in parents.items() if own == one]
    return found[1:]


def parent(pid: int) -> int | None:
    """Return the parent of a process; None if the process has ended."""
    try:
        state, own, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else int(own)


async def orphans(pids: list[int]) -> int:
    """Return the number of children that a killed process has left behind, and end them."""
    until = time.monotonic() + LINGERING
    while (left := [pid for pid in pids if parent(pid) is not None]) and time.monotonic() < until:
        await asyncio.sleep(0.2)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return len(left)


def tail(file: Path) -> str:
    return "\n".join(file.read_text(errors="replace").splitlines()[-20:])
