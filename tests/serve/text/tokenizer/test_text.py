"""Tokenizers and streamed text: whatever the chunks, the text is what the tokenizer decodes at once."""

import itertools
import json
import re
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from suite.marks import full_if
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from duetto.serve.text.tokenizer.detokenizer import Detokenizer, overlap_length
from duetto.serve.text.tokenizer.stop_strings import StopStrings
from duetto.serve.text.tokenizer.tokenizer import Tokenizer

TEXT = ["def hello(world):\n    return 'naïve café 🤗 — 東京'\n", "the cat sat on the mat. the end\n\n"] * 8
BYTES = [f"<0x{b:02X}>" for b in range(256)]
WORDS = ["▁", "▁▁", "▁the", "▁cat", "a", "b", "c", "st", "op", "é", "東", ".", "\n", "ab"]


def byte_level() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    backend.add_tokens(["<tool call>", "“"])
    return Tokenizer(backend, {"eos_token": "<|end|>"})


def pieces(strip: bool) -> Tokenizer:
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *BYTES, *WORDS])}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, {"bos_token": {"content": "<s>"}, "eos_token": "</s>"})


def metaspace() -> Tokenizer:
    backend = Backend(models.WordLevel({token: i for i, token in enumerate(WORDS)}, unk_token="a"))
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend, {})


def word_piece() -> Tokenizer:
    words = ["[UNK]", "the", "cat", "##s", "##ing", ".", "do", "n't"]
    backend = Backend(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return Tokenizer(backend, {})


KINDS = {
    "byte-level": byte_level(),
    "pieces": pieces(strip=False),
    "pieces, first space stripped": pieces(strip=True),
    "metaspace": metaspace(),
    "word piece": word_piece(),
}
EXACT = ["byte-level", "pieces", "pieces, first space stripped"]


def chunked(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(c % (len(ids) + 1) for c in cuts)})
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


def all_ids(tokenizer: Tokenizer):
    """Ids of a tokenizer, and one that it does not know."""
    return st.lists(st.integers(0, len(tokenizer)), max_size=40)


@full_if(lambda kind: kind in ("pieces, first space stripped", "word piece"))
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), skip=st.booleans(), cuts=st.lists(st.integers(0, 99), max_size=6))
@settings(max_examples=200, deadline=None)
def test_any_chunking_gives_the_decoded_text(kind, data, skip, cuts):
    tokenizer = KINDS[kind]
    ids = data.draw(all_ids(tokenizer))
    stream = Detokenizer(tokenizer, skip)
    given_out = [stream.push(chunk) for chunk in chunked(ids, cuts)]
    text = "".join(given_out) + stream.finish()
    assert text == stream.text == tokenizer.decode(ids, skip)
    assert stream.tokens_used == len(ids) and stream.stop_hit is None


@full_if(lambda kind: kind == "pieces, first space stripped")
@pytest.mark.parametrize("kind", EXACT)
@given(
    data=st.data(),
    below=st.integers(0, 12),
    include=st.booleans(),
    cuts=st.lists(st.integers(0, 99), max_size=6),
)
@settings(max_examples=300, deadline=None)
def test_stop_strings_equal_a_search_after_every_token(kind, data, below, include, cuts):
    """The oracle decodes everything again for each token, and looks character by character for the first
    stop."""
    tokenizer = KINDS[kind]
    last = st.integers(len(tokenizer) - 60, len(tokenizer) - 1)
    bytes_and_such = st.sampled_from(tokenizer.encode("\t<x\x0bé", add_special_tokens=False))
    ids = data.draw(st.lists(last | bytes_and_such, max_size=30))
    whole = tokenizer.decode(ids, True).replace("\ufffd", "")
    piece = st.integers(0, max(len(whole) - 1, 0)).flatmap(
        lambda a: st.integers(1, 4).map(lambda n: whole[a : a + n])
    )
    stops = data.draw(st.lists(piece | st.sampled_from(["st", "stop", "\n\n"]), max_size=3))
    stops = [s for s in stops if s]

    stream, used, text = Detokenizer(tokenizer, True, StopStrings(stops), include), 0, ""
    for chunk in chunked(ids, cuts):
        text += stream.push(chunk, num_below_min=max(0, below - used))
        used += len(chunk)
    text += stream.finish()

    stop, count, expected = search(tokenizer, ids, stops, include, below)
    assert (stream.stop_hit, stream.tokens_used, text) == (stop, count, expected)
    assert stream.text == text


def search(tokenizer, ids, stops, include, below):
    floor = len(tokenizer.decode(ids[: min(below, len(ids))], True).rstrip("\ufffd"))
    for k in range(below + 1, len(ids) + 1):
        text = tokenizer.decode(ids[:k], True)
        for end in range(floor + 1, len(text) + 1):
            ending = [s for s in stops if text[:end].endswith(s)]
            if ending:
                stop = max(ending, key=len)
                return stop, k, text[: end if include else end - len(stop)]
    return None, len(ids), tokenizer.decode(ids, True)


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    ids = [tokenizer.token_id(token) for token in tokens]
    assert None not in ids
    return [i for i in ids if i is not None]


def test_bytes_wait_for_their_character_or_are_replaced():
    tokenizer = KINDS["byte-level"]
    alphabet = {b: c for c, b in tokenizer._alphabet.items()}  # type: ignore[union-attr]
    ids = ids_of(tokenizer, *(alphabet[b] for b in "é".encode() + b"\xf0\x9f" + b"A"))
    stream = Detokenizer(tokenizer)
    assert [stream.push([i]) for i in ids] == ["", "é", "", "", "\ufffdA"]


def test_byte_tokens_are_emitted_once_their_text_is_final():
    tokenizer = KINDS["pieces"]
    stream = Detokenizer(tokenizer)
    assert [stream.push([i]) for i in ids_of(tokenizer, "a", "<0x0A>", "b")] == ["a", "", "\nb"]
    stream = Detokenizer(tokenizer)
    assert [stream.push([i]) for i in ids_of(tokenizer, "<0x0A>", "<0xFF>", "<0x0A>")] == [
        "",
        "\ufffd" * 2,
        "\ufffd",
    ]


def test_stop_strings_of_byte_tokens_match_on_their_last_token():
    tokenizer = KINDS["pieces"]
    stream = Detokenizer(tokenizer, stop_strings=StopStrings(["\n"]))
    stream.push(ids_of(tokenizer, "ab", "<0x0A>", "c"))
    assert (stream.text, stream.stop_hit, stream.tokens_used, stream.finish()) == ("ab", "\n", 2, "")


def test_only_what_may_begin_a_stop_string_is_held_back():
    tokenizer = KINDS["pieces"]
    tokens = ids_of(tokenizer, "a", "st", "a", "st", "op", "b")
    stream = Detokenizer(tokenizer, stop_strings=StopStrings(["stop"]))
    assert [stream.push([i]) for i in tokens] == ["a", "", "sta", "", "", ""]
    assert (stream.text, stream.tokens_used) == ("asta", 5)
    kept = Detokenizer(tokenizer, True, StopStrings(["stop"]), True)
    assert [kept.push([i]) for i in tokens] == ["a", "st", "a", "st", "op", ""]


def first_stop(text: str, stops: list[str], floor: int = 0) -> tuple[int, int]:
    """Its end and length."""
    return StopStrings(stops).find_stop(StopStrings.ROOT, text, floor)[1:]


def test_the_stop_string_complete_first_wins_then_the_longest():
    assert first_stop("xabcd", ["abcd", "bc"]) == (4, 2)
    assert first_stop("xabcd", ["bc", "abc"]) == (4, 3)
    assert first_stop("abab", ["ab"], 2) == (4, 2)
    assert first_stop("abab", ["ab"], 4) == (4, 0)
    assert (
        overlap_length("xab", ["abc", "bd"]),
        overlap_length("abc", ["abc"]),
        overlap_length("aab", ["aabaa"]),
    ) == (2, 0, 3)


STOPS = "a", "ab", "aab", "aabaa", "abab", "abaabaab"


@pytest.mark.parametrize(
    "stops", [*((stop,) for stop in STOPS), *itertools.combinations(STOPS[1:], 2), STOPS]
)
def test_stop_strings_in_pieces_equal_a_search_of_the_whole(stops):
    automaton = StopStrings(stops)
    for word, floor in itertools.product(map("".join, itertools.product("ab", repeat=6)), (0, 3, 6)):
        endings = [(i, [s for s in stops if word[:i].endswith(s)]) for i in range(floor + 1, 7)]
        expected = next(((i, max(map(len, found))) for i, found in endings if found), (6, 0))
        for size in (1, 2, 6):
            state, count, length = StopStrings.ROOT, 0, 0
            while count < 6 and not length:
                state, more, length = automaton.find_stop(state, word[count : count + size], floor - count)
                count += more
            assert (count, length) == expected, (word, size)
            begun = (n for stop in stops for n in range(len(stop)) if word[:count].endswith(stop[:n]))
            assert automaton.held_length(state) == max(begun), (word, size)


class ReadLog(list):
    """A list that counts how often it is read."""

    reads = 0

    def __getitem__(self, i):
        self.reads += 1
        return super().__getitem__(i)


def test_a_letter_costs_two_steps_whatever_the_stop_strings():
    stops = [" " * 4000 + str(i) for i in range(1024)] + ["x" * i + "y" for i in range(1, 200)]
    automaton, state = StopStrings(stops), StopStrings.ROOT
    automaton._suffix_nodes = log = ReadLog(automaton._suffix_nodes)  # type: ignore[assignment]
    for letter in (" " * 5000 + "x" * 300) * 2:
        state, _, length = automaton.find_stop(state, letter)
        assert not length
    assert log.reads <= 2 * 5300


@pytest.mark.parametrize("stops", [["ab" * 8192], [f"{i:016d}" for i in range(1024)]], ids=len)
def test_stop_strings_take_little_more_than_their_text(stops):
    tracemalloc.start()
    try:
        automaton = StopStrings(stops)
        assert tracemalloc.get_traced_memory()[0] < 1 << 19
    finally:
        tracemalloc.stop()
    assert automaton.find_stop(StopStrings.ROOT, stops[-1])[1:] == 2 * (len(stops[-1]),)


@pytest.mark.full
def test_many_long_stop_strings_cost_no_more_per_token():
    """Looking for each of their beginnings at each token would take half an hour."""
    tokenizer = KINDS["byte-level"]
    stops = [*("a" * 3 + "b" * 9000 + str(i) for i in range(200)), "a" * 9000]
    stream, a = Detokenizer(tokenizer, stop_strings=StopStrings(stops)), tokenizer.encode("a")
    assert "".join(stream.push(a) for _ in range(5000)) == ""
    assert stream.finish() == "a" * 5000


def test_only_text_after_a_prompt_keeps_its_space():
    tokenizer = KINDS["pieces, first space stripped"]
    cat = ids_of(tokenizer, "▁cat")
    assert Detokenizer(tokenizer, prompt_ids=ids_of(tokenizer, "<s>", "▁the")).push(cat) == " cat"
    assert Detokenizer(tokenizer, prompt_ids=ids_of(tokenizer, "<s>")).push(cat) == "cat"
    meta = KINDS["metaspace"]
    assert Detokenizer(meta, prompt_ids=ids_of(meta, "▁the")).push(ids_of(meta, "▁cat")) == " cat"


def test_a_long_text_costs_the_same_per_token():
    """Ten thousand tokens in one second: decoding the whole text again for each would take minutes."""
    tokenizer = KINDS["byte-level"]
    ids = tokenizer.encode(TEXT[0] * 300)
    stream = Detokenizer(tokenizer, stop_strings=StopStrings(["never"]))
    calls = []
    tokenizer_decode, tokenizer.decode = tokenizer.decode, lambda *a: calls.append(a)  # type: ignore
    try:
        text = "".join(stream.push([i]) for i in ids) + stream.finish()
    finally:
        tokenizer.decode = tokenizer_decode  # type: ignore[method-assign]
    assert text == TEXT[0] * 300 and not calls


def test_one_token_as_text():
    assert KINDS["pieces"].decode_token(KINDS["pieces"].token_id("▁cat")) == " cat"  # type: ignore[arg-type]
    assert KINDS["pieces"].decode_token(3 + 0xFF) == "\ufffd"
    assert KINDS["pieces"].token_bytes(3 + 0xFF) == b"\xff"
    assert KINDS["metaspace"].token_bytes(WORDS.index("é")) == "é".encode()
    assert KINDS["byte-level"].decode_token(10**6) == ""
    space = KINDS["byte-level"].encode(" the")[0]
    assert KINDS["byte-level"].decode_token(space).startswith(" ")
    assert b"".join(map(KINDS["byte-level"].token_bytes, KINDS["byte-level"].encode("é🤗"))) == "é🤗".encode()


def folder(path: Path, config: dict | str, post: bool = False) -> Path:
    backend = KINDS["pieces"]._backend
    if post:
        backend = Backend.from_str(backend.to_str())
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return path


@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_special_tokens_follow_the_post_processor_with_one_bos(tmp_path, flags, post):
    named = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    tokenizer = Tokenizer.from_folder(folder(tmp_path, named | flags, post))
    assert tokenizer is not None and (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    plain = ids_of(tokenizer, "a", "b", "c")
    wants_bos = post or flags.get("add_bos_token")
    assert tokenizer.encode("abc") == ([1, *plain] if wants_bos else plain)
    assert tokenizer.encode("abc", add_special_tokens=False) == plain


@pytest.mark.extras
def test_special_tokens_equal_transformers_with_a_post_processor(tmp_path):
    transformers = pytest.importorskip("transformers", reason="Transformers is the reference here")
    named = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    for flags in ({}, {"add_bos_token": True}, {"add_bos_token": False}):
        path = folder(tmp_path, named | flags, post=True)
        ours, theirs = Tokenizer.from_folder(path), transformers.AutoTokenizer.from_pretrained(path)
        assert ours is not None and ours.encode("ab<s>c") == theirs.encode("ab<s>c")
        assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)


def test_folders_without_tokenizer_are_none_and_broken_files_named(tmp_path):
    assert Tokenizer.from_folder(tmp_path) is None
    with pytest.raises(ValueError, match=r"tokenizer_config.json: (not valid JSON|holds a JSON)"):
        Tokenizer.from_folder(folder(tmp_path, "[1]"))
    (folder(tmp_path, {}) / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json cannot be read as a tokenizer"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"bos_token": 5}, "bos_token is 5, which is no token"),
        ({"bos_token": {"content": 7}}, "bos_token is {'content': 7}, which is no token"),
        ({"eos_token": ["a"]}, "eos_token is ['a'], which is no token"),
        ({"additional_special_tokens": 5}, "additional_special_tokens is 5, which is no token"),
        ({"additional_special_tokens": [5]}, "additional_special_tokens is [5], which is no token"),
        ({"chat_template": 5}, "chat_template is 5, expected a template"),
        ({"chat_template": ["a"]}, "chat_template is ['a'], expected a template"),
        (
            {"chat_template": [{"name": "default"}]},
            "chat_template is [{'name': 'default'}], expected a template",
        ),
    ],
)
def test_fields_of_the_wrong_type_are_named_with_their_file(tmp_path, config, said):
    with pytest.raises(ValueError, match=re.escape("tokenizer_config.json: " + said)) as error:
        Tokenizer.from_folder(folder(tmp_path, config))
    assert "\n" not in str(error.value)


def test_a_chat_template_that_is_no_text_is_refused(tmp_path):
    (folder(tmp_path, {}) / "chat_template.jinja").write_bytes(b"\xff\xfe{{")
    with pytest.raises(ValueError, match=r"chat_template\.jinja is not UTF-8 text"):
        Tokenizer.from_folder(tmp_path)


def test_the_default_of_several_chat_templates_is_taken(tmp_path):
    several = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    tokenizer = Tokenizer.from_folder(folder(tmp_path, {"chat_template": several}))
    assert tokenizer is not None and tokenizer.chat_template == "b"
