"""Workloads: traces in the forms that are published, read line by line, and drawn ones."""

import math
from itertools import islice
from pathlib import Path

import pytest

from duetto.serve.simulation.traces import Entry, drawn, faster, read, share

LINE = '{"timestamp": %d, "input_length": 600, "output_length": 5, "hash_ids": [0, 3]}\n'


def test_published_forms_are_read(tmp_path: Path):
    mooncake, azure, compact = tmp_path / "m.jsonl", tmp_path / "a.csv", tmp_path / "c.csv"
    mooncake.write_text(LINE % 500 + '{"timestamp": 700, "input_length": 3, "output_length": 1}\n')
    assert list(read(mooncake)) == [Entry(0.5, 600, 5, (0, 3)), Entry(0.7, 3, 1)]
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.5000000,374,44\n2023-11-16 18:15:50.0000000,396,109\n"
    )
    assert list(read(azure)) == [Entry(0.0, 374, 44), Entry(3.5, 396, 109)]
    compact.write_text("arrival_ms,prompt,output,blocks\n20,9,8,4-6 1\n")
    assert list(read(compact)) == [Entry(0.02, 9, 8, (4, 5, 6, 1))]


def test_a_trace_is_read_as_it_is_asked_for(tmp_path: Path):
    file = tmp_path / "m.jsonl"
    file.write_text(LINE % 0 + "{}\n")
    assert [e.prompt for e in islice(read(file), 1)] == [600]
    with pytest.raises(ValueError, match=r"m.jsonl, line 2: KeyError\('timestamp'\) is not what a trace has"):
        list(read(file))


@pytest.mark.parametrize(
    "name, text, error",
    [
        ("a.csv", "a,b\n1,2\n", "columns .* are not those of a trace"),
        ("a.jsonl", "{", "line 1: .* in what should be JSON"),
        (
            "a.jsonl",
            '{"timestamp": 0, "input_length": 0, "output_length": 2}',
            "0 and 2 tokens are not allowed",
        ),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, name: str, text: str, error: str):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=error):
        list(read(tmp_path / name))


def test_drawn_workloads_have_their_means_and_rates():
    entries = list(drawn(4000, rate=5.0, prompt=800, output=200))
    assert entries == list(drawn(4000, rate=5.0, prompt=800, output=200))
    assert sum(e.prompt for e in entries) / 4000 == pytest.approx(800, rel=0.05)
    assert sum(e.output for e in entries) / 4000 == pytest.approx(200, rel=0.05)
    assert 4000 / entries[-1].arrival == pytest.approx(5, rel=0.05)
    assert [e.arrival for e in drawn(3, math.inf, 8, 8)] == [0, 0, 0]
    assert list(faster(entries, 2))[-1].arrival == entries[-1].arrival / 2
    dealt = [list(share(entries, 3, i)) for i in range(3)]
    assert sorted(e.arrival for part in dealt for e in part) == [e.arrival for e in entries]
