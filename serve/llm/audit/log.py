"""The audit log of one engine: a line for the start, for weights that come later, and for each request that
has ended, written by a thread of its own."""

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
from ...host.store import warn
from ...options.engine import EngineOptions
from ...text.tokenizer.tokenizer import Tokenizer
from .chain import START, ChainWriter
from .entry import entry_of
from .facts import facts_of, needed_options, outside_contract, weights_hash, words_hash

Record = dict[str, Any]


class AuditLog:
    """Whoever has an engine says what has happened; nobody waits for the disk.

    A line is with the operating system once it is written, so that a killed process loses only what it had
    not written yet. Where the disk refuses, a warning says that the log has ended.
    """

    def __init__(self, writer: ChainWriter):
        self._writer, self._start = writer, ""
        self._made: queue.SimpleQueue[Callable[[], Record] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="duetto-audit", daemon=True)
        self._thread.start()

    def started(self, told: Callable[[], Record]) -> None:
        """The first line, which the following ones refer to by its hash."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._put(lambda: {"kind": START, "time": now, "cut_off": self._writer.cut_off, **told()})

    def replaced(self, version: int, params: Any) -> None:
        """Other weights serve from now on."""
        self._put(lambda: {"kind": "weights", "version": version, "weights": weights_hash(params)})

    def ended(self, request: Request, index: int) -> None:
        """A request has ended; what it only embeds is no answer."""
        if request.pool is None:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            self._put(lambda: entry_of(request, index) | {"time": now})

    def close(self) -> None:
        """Return when all lines are written."""
        self._made.put(None)
        if threading.current_thread() is not self._thread:  # where the garbage collector may have called
            self._thread.join()

    def _put(self, make: Callable[[], Record]) -> None:
        self._made.put(make)

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
    """The log that the options ask for, begun. Raises ValueError or OSError for a file that cannot be it."""
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
