"""Commands that serve, as users start them."""

import os
import re
import signal
import subprocess
import sys
import threading

from cases.waiting import until

LIMIT = 300.0


class Process:
    """A command that serves, from the line on that says where."""

    def __init__(self, *words: str):
        command = [sys.executable, "-m", "duetto", *words]
        env = os.environ | {"JAX_PLATFORMS": "cpu"}
        self.process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
        self.said: list[str] = []
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        self.said.extend(self.process.stderr or ())

    @property
    def url(self) -> str:
        until(lambda: any("/v1" in line for line in self.said) or self.process.poll() is not None)
        return next(found[1] for line in self.said if (found := re.search(r"at (http\S+)/v1", line)))

    def end(self, sig: int = signal.SIGKILL) -> int:
        self.process.send_signal(sig)
        code = self.process.wait(LIMIT)
        self.reader.join(LIMIT)
        if self.process.stderr is not None:
            self.process.stderr.close()
        return code
