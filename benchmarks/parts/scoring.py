"""Texts that are given are scored, as an evaluation harness does all day: documents, and the choices of
questions."""

from collections.abc import Iterator

import numpy as np

from benchmarks.engines import OURS, OURS_NARROW, STATIC
from benchmarks.harness import Bench, Row, rows_of
from benchmarks.traces import RESERVED
from benchmarks.worker import Worker

DOCUMENTS, LENGTHS = 16, (200, 500)
CHOICES, CONTEXT, CONTINUATION = 4, (180, 220), (8, 12)
BATCHES = (1, 16)  # texts of a peer's padded batch: the faster counts
Text = tuple[list[int], int]  # token ids, and the first position whose log-probability is wanted


def scoring(bench: Bench) -> Iterator[Row]:
    """Tokens a second of documents, and of each question's choices, which begin with the same context."""
    draw, questions = np.random.default_rng(5), bench.amount.questions
    texts = {
        f"{DOCUMENTS} documents": [(ids(bench, draw, LENGTHS), 1) for _ in range(DOCUMENTS)],
        f"{questions} questions of {CHOICES} choices": choices(bench, draw, questions),
    }
    for what, some in texts.items():
        count = sum(len(text) for text, _ in some)
        engines = bench.chosen(OURS, OURS_NARROW, STATIC)
        found = bench.in_turns(engines, bench.amount.rounds, lambda w, t=some: seconds(w, t), warm=True)
        rates = {engine: [count / s for s in spent] for engine, spent in found.items()}
        yield from rows_of("scoring", f"{what}, {count} tokens", "tokens/s", rates)


def seconds(worker: Worker, texts: list[Text]) -> float:
    sizes = BATCHES if worker.name.startswith(STATIC) else BATCHES[-1:]
    return min(worker.score(texts, rows) for rows in sizes)


def choices(bench: Bench, draw: np.random.Generator, questions: int) -> list[Text]:
    contexts = [ids(bench, draw, CONTEXT) for _ in range(questions)]
    return [(c + ids(bench, draw, CONTINUATION), len(c)) for c in contexts for _ in range(CHOICES)]


def ids(bench: Bench, draw: np.random.Generator, lengths: tuple[int, int]) -> list[int]:
    """Random token ids, their number between two lengths (both included)."""
    return draw.integers(RESERVED, bench.vocabulary, draw.integers(*lengths, endpoint=True)).tolist()
