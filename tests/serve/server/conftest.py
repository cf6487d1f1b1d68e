"""A server as users start it, and its clients."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from cases.requests import FLAGS
from fakes.processes import Forked, command
from prometheus_client.parser import text_string_to_metric_families
from suite.strict import STRICT

KEYS = "first-key", "second-key"
LIMIT = 600.0  # seconds: a server that hangs fails a test
OPTIONS = ["--port", "0", "--max-prefill-delay", "0", "--no-background-compilation", *FLAGS]


@dataclass
class Running:
    """A process that serves, where it does, and what it has said."""

    process: subprocess.Popen[str] | Forked
    url: str = ""
    said: list[str] = field(default_factory=list)
    reader: threading.Thread | None = None

    def read(self) -> None:
        assert self.process.stderr is not None
        self.said.extend(self.process.stderr)

    def stop(self, sig: int = signal.SIGTERM) -> int:
        self.process.send_signal(sig)
        return self.ended()

    def ended(self) -> int:
        """Its exit code, when it has ended by itself, and all that it said is read."""
        try:
            code = self.process.wait(LIMIT)
        finally:
            self.process.kill()
        if self.reader is not None:
            self.reader.join(LIMIT)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code

    def openai(self, **options: object) -> "openai.OpenAI":
        given = {"base_url": f"{self.url}/v1", "api_key": KEYS[0], "max_retries": 0, "timeout": LIMIT}
        return openai.OpenAI(**(given | options))

    def http(self, key: str = KEYS[1]) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"}
        # which certificates are trusted takes 20 ms to read
        return httpx.Client(base_url=self.url, headers=headers, timeout=LIMIT, verify=False)

    def gauges(self) -> dict[str, float]:
        """Samples of the metrics by their names; those of one name are added up."""
        found: dict[str, float] = {}
        with self.http() as http:
            for family in text_string_to_metric_families(http.get("/metrics").text):
                for sample in family.samples:
                    found[sample.name] = found.get(sample.name, 0) + sample.value
        return found

    def socket(self) -> socket.socket:
        place = urlsplit(self.url)
        return socket.create_connection((place.hostname, place.port), timeout=LIMIT)


def serving(process: subprocess.Popen[str] | Forked) -> Running:
    """A process, once it says where it serves."""
    running = Running(process)
    assert process.stderr is not None
    for line in process.stderr:
        running.said.append(line)
        if found := re.search(r"serving .* at (http.*)/v1", line):
            running.url = found[1]
            running.reader = threading.Thread(target=running.read, daemon=True)
            running.reader.start()
            return running
    raise AssertionError("".join(running.said))


def start(*options: str) -> Running:
    words = [*OPTIONS, "--served-model-name", "demo", *options]
    return serving(Forked(command, "serve", *words, heard=["stderr"], more=STRICT))


@pytest.fixture(scope="package")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("\n".join(KEYS) + "\n\n")
    return file


@pytest.fixture(scope="package")
def server(keys: Path) -> Iterator[Running]:
    """One for all tests that leave it as it was; they are a group of the run."""
    words = [
        "--api-key-file", str(keys), "--max-body", "100000", "--receive-timeout", "2",
        "--served-model-name", "demo", "--served-model-name", "other", "--tool-call-parser", "hermes",
        "--enable-auto-tool-choice",
    ]  # fmt: skip
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | STRICT
    line = [sys.executable, "-m", "duetto", "serve", *OPTIONS, *words]
    running = serving(subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True))
    yield running
    assert running.stop() == 0, running.said
    assert not any("Traceback" in line for line in running.said), running.said


@pytest.fixture
def starting() -> Iterator[Callable[..., Running]]:
    """Starts servers, which are killed after the test."""
    made: list[Running] = []

    def begin(*options: str) -> Running:
        made.append(start(*options))
        return made[-1]

    yield begin
    for running in made:
        running.process.kill()
        running.ended()
