"""The audit log of one engine: a line for its start, for each change of weights, and for each finished
request, written by its own thread."""

import queue
import threading
import weakref
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from ...engine.core.engine import Engine
from ...engine.core.request import Request
from ...host.streams import warn
from ...options.engine import EngineOptions
from ...text.tokenizer.tokenizer import Tokenizer
from .chain import START, ChainWriter
from .entry import entry_of
from .facts import facts_of, needed_options, outside_contract, weights_hash, words_hash

Record = dict[str, Any]


class AuditLog:
    """Queue of events, which a thread writes as lines: no caller waits for the disk.

    A line is passed to the operating system when it is written, so a killed process loses only queued events.
    After an error of the disk, a warning is logged and nothing more is written.
    """

    def __init__(self, writer: ChainWriter):
        self._writer, self._start = writer, ""
        self._made: queue.SimpleQueue[Callable[[], Record] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="duetto-audit", daemon=True)
        self._thread.start()

    def started(self, make: Callable[[], Record]) -> None:
        """Write the first line, whose hash the following ones refer to."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._made.put(lambda: {"kind": START, "time": now, "cut_off": self._writer.cut_off, **make()})

    def replaced(self, version: int, params: Any) -> None:
        """Record that other weights are served from now on."""
        self._made.put(lambda: {"kind": "weights", "version": version, "weights": weights_hash(params)})

    def ended(self, request: Request, index: int) -> None:
        """Record a finished request, unless it is an embedding: that is no answer."""
        if request.pool is None:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            self._made.put(lambda: entry_of(request, index) | {"time": now})

    def close(self) -> None:
        """Wait until all lines are written."""
        self._made.put(None)
        if threading.current_thread() is not self._thread:  # where the garbage collector may have called
            self._thread.join()

    def _run(self) -> None:
        try:
            while (make := self._made.get()) is not None:
                record = make()
                if record["kind"] == START:
                    self._start = self._writer.append(record)
                else:
                    self._writer.append({"start": self._start, **record})
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            warn(f"the audit log has ended, nothing more is written: {type(error).__name__}: {error}")
            while self._made.get() is not None:  # or requests that have ended would stay in memory
                pass
        finally:
            self._writer.close()


def opened(
    engine: Engine, options: EngineOptions, tokenizer: Tokenizer | None, model: str | None
) -> AuditLog | None:
    """Return the log that the options name, with its first line queued, or None. Raises ValueError or OSError
    for a file that cannot be one."""
    if options.audit_log is None:
        return None
    log = AuditLog(ChainWriter(Path(options.audit_log)))
    params, facts, outside = engine.params, facts_of(engine, options), outside_contract(engine, options)
    needed = msgspec.json.decode(msgspec.json.encode(needed_options(options)))

    def start_record() -> Record:
        return {
            "model": model,
            "options": needed,
            "facts": facts,
            "tokenizer": words_hash(tokenizer),
            "outside_contract": outside,
            "weights": weights_hash(params),
        }

    log.started(start_record)
    weakref.finalize(engine, log.close)  # also at the end of the process
    return log
