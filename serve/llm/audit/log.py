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
from ...host.streams import warn_once
from ...options.engine import EngineOptions
from ...text.tokenizer.tokenizer import Tokenizer
from .chain import START_KIND, ChainWriter
from .entry import request_entry
from .facts import contract_exceptions, engine_facts, hash_tokenizer, hash_weights, replay_options

LogRecord = dict[str, Any]


class AuditLog:
    """Queue of events. A thread writes them as lines, so no caller waits for the disk.

    A written line is with the operating system: a killed process loses only queued events. After an error of
    the disk, a warning is logged and nothing more is written.
    """

    def __init__(self, writer: ChainWriter):
        self._writer, self._start_hash = writer, ""
        self._record_makers: queue.SimpleQueue[Callable[[], LogRecord] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_records, name="duetto-audit-log", daemon=True)
        self._thread.start()

    def on_start(self, make_record: Callable[[], LogRecord]) -> None:
        """Queue the line of the start. Later lines refer to it by its hash."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._record_makers.put(
            lambda: {"kind": START_KIND, "time": now, "cut_off": self._writer.cut_off_bytes, **make_record()}
        )

    def on_weights_replaced(self, version: int, params: Any) -> None:
        """Queue a line with the hash of the weights that are served from now on."""
        self._record_makers.put(
            lambda: {"kind": "weights", "version": version, "weights": hash_weights(params)}
        )

    def on_request_end(self, request: Request, index: int) -> None:
        """Queue the line of a finished request. Embeddings are not logged."""
        if request.pooler is None:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            self._record_makers.put(lambda: request_entry(request, index) | {"time": now})

    def close(self) -> None:
        """Wait until all queued lines are written, and close the file."""
        self._record_makers.put(None)
        if threading.current_thread() is not self._thread:  # where the garbage collector may have called
            self._thread.join()

    def _write_records(self) -> None:
        try:
            while (make_record := self._record_makers.get()) is not None:
                record = make_record()
                if record["kind"] == START_KIND:
                    self._start_hash = self._writer.append(record)
                else:
                    self._writer.append({"start": self._start_hash, **record})
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            warn_once(f"the audit log has ended, nothing more is written: {type(error).__name__}: {error}")
            while self._record_makers.get() is not None:  # or requests that have ended would stay in memory
                pass
        finally:
            self._writer.close()


def open_audit_log(
    engine: Engine, options: EngineOptions, tokenizer: Tokenizer | None, model: str | None
) -> AuditLog | None:
    """Open the audit log that the options name, and queue the line of the start. Returns None if they name
    none. Raises ValueError or OSError for a file that cannot be a log."""
    if options.audit_log is None:
        return None
    log = AuditLog(ChainWriter(Path(options.audit_log)))
    params, facts = engine.params, engine_facts(engine, options)
    exceptions = contract_exceptions(engine, options)
    needed = msgspec.json.decode(msgspec.json.encode(replay_options(options)))

    def make_start_record() -> LogRecord:
        return {
            "model": model,
            "options": needed,
            "facts": facts,
            "tokenizer": hash_tokenizer(tokenizer),
            "outside_contract": exceptions,
            "weights": hash_weights(params),
        }

    log.on_start(make_start_record)
    weakref.finalize(engine, log.close)  # also at the end of the process
    return log
