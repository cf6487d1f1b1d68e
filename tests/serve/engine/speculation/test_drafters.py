"""Drafters on the host against plain searches, their bounds, and the keys of `speculative_config`."""

import json
import tracemalloc
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duetto.serve.engine.speculation.drafter import (
    DEVICE_DRAFTER,
    NO_DRAFTER,
    ConstantDrafter,
    Drafter,
    make_host_drafter,
)
from duetto.serve.engine.speculation.ngram import NgramDrafter, NgramIndex
from duetto.serve.engine.speculation.suffix import ANCHOR_TOKENS, MAX_OCCURRENCES, SuffixDrafter, SuffixIndex
from duetto.serve.options.speculation import METHODS, SpeculativeConfig

TEXT = st.lists(st.integers(0, 3), max_size=60)


# ---------------------------------------------------------------- n-gram


def looked_up(tokens: Sequence[int], low: int, high: int, k: int) -> list[int]:
    """The plain search: longest run first, latest place first, copying from the text as it grows."""
    for n in range(high, low - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if n <= len(tokens) and list(tokens[end - n : end]) == list(tokens[len(tokens) - n :]):
                grown = list(tokens)
                for i in range(k):
                    grown.append(grown[end + i])
                return grown[len(tokens) :]
    return []


@given(TEXT, st.integers(1, 3), st.integers(0, 3), st.integers(1, 6))
@settings(max_examples=300, deadline=None)
def test_lookup_equals_the_plain_search(text: list[int], low: int, more: int, k: int):
    lookup = NgramIndex(low, low + more)
    for i, token in enumerate(text):
        lookup.extend([token])
        assert lookup.propose(k) == looked_up(text[: i + 1], low, low + more, k)


@given(TEXT, st.integers(0, 40), st.integers(1, 3), st.integers(0, 3))
@settings(max_examples=300, deadline=None)
def test_many_tokens_at_once_are_indexed_as_each_in_turn(text: list[int], cut: int, low: int, more: int):
    lookups = [NgramIndex(low, low + more, window=8) for _ in range(2)]
    for token in text:
        lookups[0].extend([token])
    lookups[1].extend(text[:cut])
    lookups[1].extend(text[cut:])
    assert lookups[0].after == lookups[1].after and lookups[0].tokens == lookups[1].tokens


def test_lookup_forgets_what_left_its_window():
    lookup = NgramIndex(2, 4, window=100)
    for token in np.random.default_rng(0).integers(0, 1000, 5000).tolist():
        lookup.extend([token])
    assert len(lookup.after) <= 3 * 100
    again = NgramIndex(2, 4, window=100)
    for token in [1, 2, 3, *range(10, 300), 1, 2]:
        again.extend([token])
    assert again.propose(2) == []


def test_lookup_reads_each_token_a_fixed_number_of_times():
    """The cost of a token does not grow with the text: counted in entries of the index, not in seconds."""
    lookup = NgramIndex(2, 5)
    for token in range(2000):
        before = len(lookup.after)
        lookup.extend([token])
        assert len(lookup.after) - before <= 4


# ---------------------------------------------------------------- suffix


def voted(stored: list[list[int]], context: list[int], depth: int, k: int, factor: float, least: float):
    """The best continuation over all lengths of a match, by reading every stored sequence as a whole."""
    best: tuple[list[int], float] = [], 0.0
    for length in range(min(depth, len(context)), ANCHOR_TOKENS - 1, -1):
        suffix = context[len(context) - length :]
        tails = [s[i:] for s in stored for i in range(length, len(s)) if s[i - length : i] == suffix]
        tokens, sure, expected = [], 1.0, 0.0
        while tails and len(tokens) < min(k, max(1, int(factor * length))):
            heads = [tail[len(tokens)] for tail in tails if len(tail) > len(tokens)]
            if not heads:
                break
            share = max(heads.count(t) for t in heads) / len(tails)
            token = next(t for t in reversed(heads) if heads.count(t) / len(tails) == share)
            if sure * share < least:
                break
            sure, expected, tails = (
                sure * share,
                expected + sure * share,
                [tail for tail in tails if len(tail) > len(tokens) and tail[len(tokens)] == token],
            )
            tokens.append(token)
        if expected > best[1] + 1e-12:
            best = tokens, expected
    return best


@given(st.lists(TEXT, min_size=1, max_size=4), st.integers(1, 6), st.sampled_from([0.5, 1.0, 2.0]))
@settings(max_examples=300, deadline=None)
def test_suffix_index_equals_the_plain_count(stored: list[list[int]], k: int, factor: float):
    index = SuffixIndex(capacity=10_000, depth=6)
    for key, tokens in enumerate(stored):
        index.extend(key, tokens)
    if any(len(places) >= MAX_OCCURRENCES for places in index.occurrences.values()):
        return  # the plain count has no bound
    for context in stored:
        found = index.propose(context, k, factor, 0.1)
        tokens, expected = voted(stored, context, 6, k, factor, 0.1)
        assert found.expected == pytest.approx(expected) and len(found.tokens) == len(tokens)


def test_suffix_index_drafts_frequent_tokens_and_stops_when_unsure():
    index = SuffixIndex(capacity=1000, depth=8)
    for key, after in enumerate([[7, 8, 1], [7, 8, 2], [7, 8, 3], [9, 9, 9]]):
        index.extend(key, [1, 2, 3, *after])
    assert index.propose([5, 1, 2, 3], k=3, spec_factor=1.0, min_token_prob=0.3).tokens == [7, 8]
    assert index.propose([5, 1, 2, 3], k=3, spec_factor=1.0, min_token_prob=0.8).tokens == []
    assert index.propose([1, 2, 4], k=3, spec_factor=1.0, min_token_prob=0.1).tokens == []


def test_suffix_index_evicts_the_least_used_beyond_its_capacity():
    index, rng = SuffixIndex(capacity=1000, depth=8), np.random.default_rng(1)
    index.extend("useful", [1, 2, 3, 4, 5, 6])
    for key in range(200):
        index.extend(key, rng.integers(10, 10_000, 40).tolist())
        assert index.propose([1, 2, 3], 2, 1.0, 0.1).tokens == [4, 5]
        assert index.size <= 1000 and index.size == sum(map(len, index.sequences.values()))
    places = [place for found in index.occurrences.values() for place in found]
    assert {key for key, _ in places} <= set(index.sequences) and len(places) <= 1000
    for key in list(index.sequences):
        index.drop(key)
    assert not index.occurrences and index.size == 0


def test_suffix_drafter_learns_from_finished_outputs():
    drafter = SuffixDrafter()
    output = [50, 51, 52, 53, 54, 55]
    drafter.begin("a", [1, 2, 3])
    drafter.extend("a", output)
    drafter.begin("b", [9])
    drafter.extend("b", [50, 51, 52])
    assert drafter.propose("b", 4) == []
    drafter.end("a")
    assert drafter.propose("b", 4) == [53, 54, 55]
    drafter.end("b")
    drafter.end("b")
    assert drafter.requests == {}


def test_suffix_drafter_does_not_learn_prompts_of_others():
    drafter = SuffixDrafter()
    drafter.begin("a", [1, 2, 3, 4, 5, 6])
    drafter.extend("a", [7, 8, 9, 10, 11])
    drafter.end("a")
    drafter.begin("b", [1, 2, 3])
    assert drafter.propose("b", 3) == []


def test_suffix_drafter_learns_from_outputs_of_the_same_salt_only():
    drafter = SuffixDrafter(capacity=20)
    for request, salt in (("a", b"a"), ("plain", b"")):
        drafter.begin(request, [1, 2, 3], salt)
        drafter.extend(request, [50, 51, 52, 53] + [54 + len(salt)] * 2)
        drafter.end(request)
    for salt, expected in ((b"a", [53, 55, 55]), (b"", [53, 54, 54]), (b"b", [])):
        drafter.begin("last", [9], salt)
        drafter.extend("last", [50, 51, 52])
        assert drafter.propose("last", 3) == expected
        drafter.end("last")
    for i in range(9):  # those that are evicted leave nothing
        drafter.begin(i, [1], b"c")
        drafter.extend(i, [*range(100 * i, 100 * i + 10)])
        drafter.end(i)
    index = drafter.finished_outputs
    assert index.salts.keys() == index.sequences.keys() and {*index.salts.values()} == {b"c"}


# ---------------------------------------------------------------- every drafter

MAKERS: dict[str, Callable[[], Drafter]] = {
    "ngram": lambda: NgramDrafter(2, 4),
    "suffix": lambda: SuffixDrafter(capacity=5000),
    "none": ConstantDrafter,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_drafter_releases_ended_requests(make: Callable[[], Drafter]):
    """A thousand requests one after the other need no more memory than the first hundred."""
    drafter, rng = make(), np.random.default_rng(3)

    def serve(count: int) -> None:
        for i in range(count):
            drafter.begin(i, rng.integers(0, 50, 30).tolist())
            for token in rng.integers(0, 50, 20).tolist():
                drafter.extend(i, [token])
                assert len(drafter.propose(i, 3)) <= 3
            drafter.end(i)

    serve(150)
    tracemalloc.start()
    try:
        serve(100)
        first, _ = tracemalloc.get_traced_memory()
        serve(300)
        assert tracemalloc.get_traced_memory()[0] < first + 300_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_interleaved_requests_are_drafted_independently(make: Callable[[], Drafter]):
    together, rng = make(), np.random.default_rng(4)
    texts = {key: rng.integers(0, 4, 80).tolist() for key in "xyz"}
    alone = {key: make() for key in texts}
    for key, text in texts.items():
        together.begin(key, text[:10])
        alone[key].begin(key, text[:10])
    for i in range(10, 80):
        for key, text in texts.items():
            together.extend(key, text[i : i + 1])
            alone[key].extend(key, text[i : i + 1])
            assert together.propose(key, 4) == alone[key].propose(key, 4)


def test_repeated_text_is_drafted():
    """A period of 20 tokens: after one and a half of them every guess is right."""
    text = list(range(100, 120)) * 4
    for make in (MAKERS["ngram"], MAKERS["suffix"]):
        drafter = make()
        drafter.begin(0, text[:30])
        for i in range(30, 70):
            assert drafter.propose(0, 4)[:1] == text[i : i + 1]
            drafter.extend(0, text[i : i + 1])


# ---------------------------------------------------------------- configuration


def test_configurations_as_vllm_writes_them():
    read = SpeculativeConfig.from_dict
    assert read(None) == read({}) == read({"method": "none"}) and read(None).method == "none"
    ngram = read({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4})
    assert (ngram.prompt_lookup_min, ngram.prompt_lookup_max, ngram.num_speculative_tokens) == (4, 4, 5)
    assert read({"method": "ngram", "prompt_lookup_min": 3}).prompt_lookup_max == 3
    free = read({"method": "ngram"})
    assert (free.prompt_lookup_min, free.prompt_lookup_max) == (1, 3)
    assert read({"model": "a/folder", "num_speculative_tokens": 3}).method == "draft_model"
    tree = read(json.loads('{"method": "tree", "model": "m", "speculative_token_tree": [[0], [1], [0, 0]]}'))
    assert tree.speculative_token_tree == ((0,), (1,), (0, 0))
    assert read(ngram) is ngram and hash(ngram) == hash(read({**vars(ngram)}))


REFUSED = {
    "an unknown key": ({"method": "ngram", "lookup": 3}, TypeError, "lookup"),
    "an unknown method": ({"method": "eagle"}, ValueError, "method='eagle'.*ngram"),
    "no method": ({"num_speculative_tokens": 3}, ValueError, "method is missing"),
    "no guesses": ({"method": "ngram", "num_speculative_tokens": 0}, ValueError, "num_speculative_tokens=0"),
    "too many guesses": ({"method": "ngram", "num_speculative_tokens": 65}, ValueError, "1 to 64"),
    "a word for a number": (
        {"method": "ngram", "num_speculative_tokens": "5"},
        TypeError,
        "num_speculative_tokens",
    ),
    "ends that cross": (
        {"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3},
        ValueError,
        r"prompt_lookup_max=3.*prompt_lookup_min \(4\)",
    ),
    "a run of nothing": ({"method": "ngram", "prompt_lookup_min": 0}, ValueError, "prompt_lookup_min=0"),
    "another method's key": (
        {"method": "suffix", "prompt_lookup_max": 3},
        ValueError,
        "only with method ngram",
    ),
    "a model that nobody reads": ({"method": "ngram", "model": "m"}, ValueError, "model='m'"),
    "heads without a folder": ({"method": "heads"}, ValueError, "model=None"),
    "an unknown acceptance": (
        {"method": "ngram", "acceptance": "typical"},
        ValueError,
        "coupled or rejection",
    ),
    "a share above one": (
        {"method": "suffix", "suffix_decoding_min_token_prob": 1.5},
        ValueError,
        "suffix_decoding_min_token_prob=1.5",
    ),
}


@pytest.mark.parametrize(("values", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(values: dict, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        SpeculativeConfig.from_dict(values)


def test_every_method_has_a_drafter():
    kinds = {"ngram": NgramDrafter, "suffix": SuffixDrafter}
    for method in METHODS:
        model = {"model": "m"} if method in ("draft_model", "heads", "tree") else {}
        drafter = make_host_drafter(SpeculativeConfig.from_dict({"method": method} | model))
        if method in kinds:
            assert type(drafter) is kinds[method]
        else:
            assert drafter == (DEVICE_DRAFTER if model else NO_DRAFTER)
