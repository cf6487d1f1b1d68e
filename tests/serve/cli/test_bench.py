"""What `duetto bench` measures of a start, and its picture of a step."""

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from duetto.serve.cli.bench import programs
from duetto.serve.cli.bench.timeline import StepTimeline, find_device_spans, render_timeline
from duetto.serve.cli.main import main
from duetto.serve.engine.metrics.host_parts import PART_NAMES
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


def test_the_picture_of_a_step_names_all_parts(source: Path, tmp_path: Path, capsys):
    file = tmp_path / "step.svg"
    flags = "--widths", "2", "--contexts", "16", "--repeats", "1"
    assert main(["bench", "--model", str(source), "--trace", str(file), *flags]) == 0
    picture = ElementTree.fromstring(file.read_text())
    texts = [str(element.text) for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    for part in (*PART_NAMES, "device"):
        assert any(re.fullmatch(rf"{part} [\d.]+ ms, [\d.]+%", text) for text in texts), part
    told = capsys.readouterr().out
    assert "decode[2,1] at 16 tokens" in texts[0] and texts[0].split(":")[0] in told and "floor" not in told


def test_a_call_begins_at_its_dispatch_or_after_the_last():
    steps = [[("schedule", 0.0, 1.0), ("dispatch", 1.0, 2.0)], [("dispatch", 3.0, 4.0), ("wait", 4.0, 5.0)]]
    assert [*find_device_spans(steps, [2.5, 6.0])] == [("device", 1.0, 2.5), ("device", 3.0, 6.0)]
    assert [*find_device_spans(steps, [5.0, 6.0])] == [("device", 1.0, 5.0), ("device", 5.0, 6.0)]


def test_the_legend_has_the_shares_of_a_step():
    spans = [("schedule", 0.0, 0.002), ("dispatch", 0.002, 0.003), ("schedule", 0.003, 0.004)]
    picture = render_timeline(StepTimeline(0.004, spans, [("device", 0.002, 0.004)]), "a < b")
    for text in (
        "a &lt; b: 4.000 ms",
        "schedule 3.000 ms, 75.0%",
        "wait 0.000 ms, 0.0%",
        "device 2.000 ms, 50.0%",
    ):
        assert f">{text}</text>" in picture
