"""Workloads: traces in the forms that are published, read line by line, and drawn ones."""

import math
from itertools import islice
from pathlib import Path

import pytest

from duetto.serve.planner.workloads.traces import TraceEntry, draw_requests, read_trace, speed_up

LINE = '{"timestamp": %d, "input_length": 600, "output_length": 5, "hash_ids": [7, "a", 9]}\n'


def test_published_forms_are_read(tmp_path: Path):
    mooncake, azure, compact = tmp_path / "m.jsonl", tmp_path / "a.csv", tmp_path / "c.csv"
    mooncake.write_text(LINE % 500 + '{"timestamp": 700, "input_length": 3, "output_length": 1}\n')
    assert list(read_trace(mooncake)) == [TraceEntry(0.5, 600, 5, (0, 1)), TraceEntry(0.7, 3, 1)]
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.5000000,374,44\n2023-11-16 18:15:50.0000000,396,109\n"
    )
    assert list(read_trace(azure)) == [TraceEntry(0.0, 374, 44), TraceEntry(3.5, 396, 109)]
    compact.write_text("arrival_ms,prompt,output,blocks\n20,1600,8,4-6 1\n30,513,8,5-99999999\n")
    assert list(read_trace(compact)) == [
        TraceEntry(0.02, 1600, 8, (0, 1, 2, 3)),
        TraceEntry(0.03, 513, 8, (1, 2)),
    ]


def test_a_trace_is_read_as_it_is_asked_for(tmp_path: Path):
    file = tmp_path / "m.jsonl"
    file.write_text(LINE % 0 + "{}\n")
    assert [e.prompt_tokens for e in islice(read_trace(file), 1)] == [600]
    with pytest.raises(ValueError, match=r"m.jsonl, line 2: Object missing required field `timestamp`: '{}'"):
        list(read_trace(file))


@pytest.mark.parametrize(
    "name, text, error",
    [
        ("a.csv", "a,b\n1,2\n", "columns a, b are not those of a trace: lines of JSON with timestamp, .* or"),
        ("a.jsonl", "{", "line 1: Input data was truncated: '{'"),
        ("a.jsonl", LINE % 0 + "[1]", r"line 2: Expected `object`, got `array`: '\[1\]'"),
        ("a.jsonl", LINE % 0 + (LINE % 5).replace("600", "0"), "line 2: Expected `int` >= 1 .*input_length"),
        ("a.jsonl", (LINE % 5).replace("600", "1.5"), "Expected `int`, got `float` - at `.*input_length"),
        ("a.jsonl", (LINE % 5).replace(": 5,", ": NaN,"), "line 1: JSON is malformed: .* NaN"),
        ("a.jsonl", (LINE % 5).replace('"a"', "null"), r"Expected `int . str`, got `null` - at `.*hash_ids"),
        ("a.csv", "arrival_ms,prompt,output\n\nnan,2,3\n", "line 3: Expected `float` .*arrival_ms"),
        ("a.csv", "arrival_ms,prompt,output\n1,2\n", "line 2: Expected `int`, got `null` - at `.*output"),
        ("a.csv", "arrival_ms,prompt,output,blocks\n1,2,3,4 x\n", "line 2: Expected `str` matching .*4 x"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnow,2,3\n", "line 2: Invalid RFC3339 .*now"),
        ("a.csv", b"\xff\xfe\x00", "a.csv, after line 0: .* can't decode byte"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, name: str, text: str | bytes, error: str):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=error):
        list(read_trace(tmp_path / name))


def test_drawn_workloads_have_their_means_and_rates():
    entries = list(draw_requests(4000, rate=5.0, prompt=800, output=200))
    assert entries == list(draw_requests(4000, rate=5.0, prompt=800, output=200))
    assert sum(e.prompt_tokens for e in entries) / 4000 == pytest.approx(800, rel=0.05)
    assert sum(e.output_tokens for e in entries) / 4000 == pytest.approx(200, rel=0.05)
    assert 4000 / entries[-1].arrival == pytest.approx(5, rel=0.05)
    assert [e.arrival for e in draw_requests(3, math.inf, 8, 8)] == [0, 0, 0]
    assert list(speed_up(entries, 2))[-1].arrival == entries[-1].arrival / 2
