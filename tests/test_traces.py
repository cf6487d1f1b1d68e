"""Traces of requests that the benchmarks replay."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks.traces import (
    AZURE,
    BLOCK_TOKENS,
    MOONCAKE,
    Scale,
    conversations,
    read,
    replayed,
    with_prefixes,
)


def test_traces_are_what_their_readme_says():
    azure, mooncake = read(AZURE), read(MOONCAKE)
    assert len(azure) == 2000 and azure[0].prompt_tokens == 374 and azure[0].output_tokens == 44
    assert 1050 < np.mean([e.prompt_tokens for e in azure]) < 1150
    assert len(mooncake) == 1000
    assert all(len(e.blocks) == -(-e.prompt_tokens // BLOCK_TOKENS) for e in mooncake)
    for entries in (azure, mooncake):
        assert all(a.arrival <= b.arrival for a, b in pairwise(entries))
    assert sum(file.stat().st_size for file in (AZURE, MOONCAKE)) < 100_000


def test_the_full_files_are_read_too(tmp_path: Path):
    azure, mooncake = tmp_path / "a.csv", tmp_path / "m.jsonl"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    mooncake.write_text('{"timestamp": 500, "input_length": 600, "output_length": 5, "hash_ids": [0, 3]}\n')
    assert [(round(e.arrival, 3), e.prompt_tokens, e.output_tokens) for e in read(azure)] == [
        (0, 374, 44),
        (4.315, 396, 109),
    ]
    assert (read(mooncake)[0].arrival, read(mooncake)[0].blocks) == (0.5, (0, 1))
    azure.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="are not those of a trace"):
        read(azure)


def test_requests_share_the_tokens_of_the_blocks_that_they_share():
    entries = conversations(read(MOONCAKE), 20, 4096)
    requests = with_prefixes(entries, 300, 8)
    assert len(entries) >= 20 and all(e.prompt_tokens <= 4096 for e in entries)
    assert requests == with_prefixes(entries, 300, 8)
    for e, r in zip(entries, requests, strict=True):
        assert len(r.prompt) == max(e.prompt_tokens // 8, 1) and min(r.prompt) >= 3
    first, later = (requests[i].prompt[: BLOCK_TOKENS // 8] for i in (0, -1))
    assert (first == later) == (entries[0].blocks[0] == entries[-1].blocks[0])


def test_arrivals_are_stretched_to_a_rate():
    entries = [Scale(8, 64, 8)(e) for e in read(AZURE)[:50]]
    assert max(e.prompt_tokens for e in entries) == 64 and min(e.output_tokens for e in entries) >= 1
    requests = replayed(entries, 300, rate=2.0)
    assert requests[-1].arrival == pytest.approx(25) and requests[0].arrival == 0
