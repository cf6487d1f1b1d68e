"""What `duetto bench` measures of a start."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from duetto.serve.cli.bench import programs
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.roofline.targets import GPUS


class WarmingEngine:
    """Warms up until it has been asked once whether it does."""

    def __init__(self):
        self._warmups = iter(["a warm-up"])

    @property
    def warmup(self) -> str | None:
        return next(self._warmups, None)


def test_starts_without_and_with_stored_programs_are_measured(monkeypatch: pytest.MonkeyPatch):
    folders, found, settings = list[str](), list[bool](), list[tuple[str, Any]]()

    @contextmanager
    def start(*_: Any, **__: Any) -> Iterator[SimpleNamespace]:
        stored = Path(folders[-1]) / "program"
        found.append(stored.exists())
        yield SimpleNamespace(
            engine=WarmingEngine(),
            generate=lambda *_, **__: stored.touch(),
            report=lambda: {"programs": 3},
        )

    config = SimpleNamespace(update=lambda *setting: settings.append(setting))
    monkeypatch.setattr(programs, "LLM", SimpleNamespace(from_params=start))
    monkeypatch.setattr(programs, "enable_compilation_cache", folders.append)
    monkeypatch.setattr(programs, "jax", SimpleNamespace(clear_caches=lambda: None, config=config))
    nothing: Any = None
    model = programs.BenchModel("tiny", nothing, nothing, EngineOptions())
    figures = [*programs.bench_startup(model, argparse.Namespace(), GPUS["h200"])]
    assert [(x.part, x.what, x.context, x.tokens_per_second) for x in figures] == [
        ("startup", f"{kind}, {end}", 0, 0.0)
        for kind in ("cold", "warm")
        for end in ("first token", "3 programs")
    ]
    for first, ready in (figures[:2], figures[2:]):
        assert 0 < first.seconds < ready.seconds
    assert found == [False, True] and len(folders) == 1
    assert settings == [("jax_compilation_cache_dir", None)] and not Path(folders[0]).exists()
