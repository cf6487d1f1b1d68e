"""An engine in a process of its own: calls go in and results come out as lines of JSON.

The process sleeps between calls, so that engines can take turns on one machine without sharing its threads.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.engines import VARIANTS, Answer, Served, Setting
from benchmarks.traces import Request

ROOT = Path(__file__).resolve().parents[1]


class WorkerError(RuntimeError):
    """An engine failed: its name, and the end of what its process wrote."""


class Worker:
    """The parent's side: the methods of an `Engine`, answered by a child process."""

    def __init__(self, name: str, folder: Path, setting: Setting):
        self.name = name
        job = json.dumps({"name": name, "folder": str(folder), "setting": asdict(setting)})
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by close()
        command = [sys.executable, "-m", "benchmarks.worker", job]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log}
        env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # several engines share a device
        self._child = subprocess.Popen(command, cwd=ROOT, env=env, text=True, **pipes)
        self.seconds_to_load = self._receive()

    def serve(self, requests: list[Request]) -> Served:
        found = self._call("serve", [asdict(r) for r in requests])
        return Served(found["seconds"], [Answer(**a) for a in found["answers"]], found["counts"])

    def decode(self, rows: int, context: int, steps: int) -> float:
        return self._call("decode", rows, context, steps)

    def prefill(self, length: int) -> float:
        return self._call("prefill", length)

    def score(self, texts: list[tuple[list[int], int]], rows: int) -> float:
        return self._call("score", texts, rows)

    def close(self) -> None:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.close()
        self._child.wait()
        self._child.stdout.close()
        self._log.close()

    def _call(self, method: str, *args: Any) -> Any:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps([method, args]) + "\n")
        self._child.stdin.flush()
        return self._receive()

    def _receive(self) -> Any:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            self._child.wait()
            self._log.seek(0)
            raise WorkerError(f"{self.name} ended: {self._log.read()[-2000:].strip()}")
        return json.loads(line)


def main(job: dict[str, Any]) -> None:
    """The child's side: makes the engine, then answers until its input ends."""
    import time

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer

    def reply(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    begin = time.perf_counter()
    engine = VARIANTS[job["name"]].make(Path(job["folder"]), Setting(**job["setting"]))
    reply(time.perf_counter() - begin)
    for line in sys.stdin:
        method, args = json.loads(line)
        if method == "serve":
            reply(asdict(engine.serve([Request(**r) for r in args[0]])))
        else:
            reply(getattr(engine, method)(*args))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
