"""A journal that was damaged: what is whole is kept, what is not is counted, and what cannot be read is not
erased."""

import zlib
from pathlib import Path

import msgspec
import pytest
from fakes.batch import MODEL, FakeEngine, journal_of

LINES = [{"prompt": f"p{i}", "id": i} for i in range(30)]


@pytest.fixture
def begun(run, tmp_path, capsys) -> Path:
    """The journal of a job that died with 28 of 30 lines answered."""
    with pytest.raises(RuntimeError):
        run(LINES, FakeEngine(die_after=14))
    capsys.readouterr()
    path = journal_of(tmp_path / "out.jsonl")
    assert path.read_bytes().count(b"\n") == 29
    return path


def flip(path: Path, record: int, offset: int = 30) -> None:
    """Flips a bit of a record; record 0 is the header."""
    lines = path.read_bytes().splitlines(keepends=True)
    line = bytearray(lines[record])
    line[offset] ^= 1
    lines[record] = bytes(line)
    path.write_bytes(b"".join(lines))


def record(about: bytes, answer: bytes = b"{}") -> bytes:
    content = about + b"\t" + answer
    return b"%08x %s\n" % (zlib.crc32(content), content)


@pytest.mark.parametrize(("damaged", "lost"), [([1], 1), ([1, 2, 9], 3), ([28], 1), ([27, 28], 2)])
def test_only_damaged_records_are_lost(run, begun, capsys, damaged, lost):
    whole = run(LINES, name="whole").out.read_bytes()
    run_before = begun.read_bytes()
    for n in damaged:
        flip(begun, n)
    assert begun.read_bytes() != run_before
    capsys.readouterr()
    result = run(LINES)
    assert result.code == 0 and result.out.read_bytes() == whole
    assert len(result.engine.ran) == 2 + lost
    assert f"{lost} damaged record" in capsys.readouterr().err


def test_a_lost_newline_costs_the_two_joined_lines(run, begun):
    flip(begun, 5, offset=-1)
    assert len(run(LINES).engine.ran) == 2 + 2


def test_a_torn_last_record_is_not_reported(run, begun, capsys):
    begun.write_bytes(begun.read_bytes()[:-7])
    result = run(LINES)
    assert result.code == 0 and len(result.engine.ran) == 3
    assert "damaged" not in capsys.readouterr().err


@pytest.mark.parametrize("damaged", [[1], [28], list(range(1, 29))])
def test_another_jobs_damaged_journal_is_not_erased(run, begun, capsys, damaged):
    for n in damaged:
        flip(begun, n)
    before = begun.read_bytes()
    result = run(LINES, model={**MODEL, "model": "real"})
    assert result.code == 1 and not result.engine.ran and begun.read_bytes() == before
    assert "holds answers of another job" in capsys.readouterr().err


@pytest.mark.parametrize("offset", [3, 20, 60, -1])
def test_a_damaged_header_is_refused_and_nothing_erased(run, begun, capsys, offset):
    flip(begun, 0, offset)
    before = begun.read_bytes()
    result = run(LINES)
    assert result.code == 1 and begun.read_bytes() == before and not result.engine.ran
    said = capsys.readouterr().err
    assert "is not a journal" in said if offset == 3 else "is damaged" in said


HEADERS = [b"[]", b"3", b'{"fingerprint": [1], "started": "x"}', b'{"fingerprint": {}}', b"{}}", b"\xff"]
HEADERS.append(b'{"fingerprint": {}, "started": "yesterday"}')


@pytest.mark.parametrize("about", HEADERS, ids=repr)
def test_a_header_of_wrong_types_is_refused_in_a_sentence(run, begun, capsys, about):
    records = begun.read_bytes().splitlines(keepends=True)[1:]
    begun.write_bytes(b"duetto-journal-1 " + record(about, b"") + b"".join(records))
    before = begun.read_bytes()
    assert run(LINES).code == 1 and begun.read_bytes() == before
    said = capsys.readouterr().err
    assert "is damaged" in said and "28 whole" in said


def test_a_header_with_an_invalid_token_is_refused(run, begun, capsys, tmp_path):
    """It becomes part of a file's name."""
    first, _, rest = begun.read_bytes().partition(b"\n")
    about = msgspec.json.decode(first.split(b" ", 2)[2].partition(b"\t")[0])
    about["token"] = "../../victim"
    begun.write_bytes(b"duetto-journal-1 " + record(msgspec.json.encode(about), b"") + rest)
    assert run(LINES).code == 1 and "is damaged" in capsys.readouterr().err


WRONG = [
    *(b"[]", b"7", b'"x"', b"null", b"{}", b"{", b"\xff\xfe", b"[" * 5000),
    *(b'{"index": "1", "digest": 2}', b'{"index": 1}', b'{"index": true, "digest": 2}'),
    *(b'{"index": -1, "digest": 2}', b'{"index": 99999999999, "digest": 2}', b'{"index": 30, "digest": 2}'),
    *(b'{"index": 1, "digest": -2}', b'{"index": 1, "digest": 18446744073709551616}'),
    *(b'{"index": 1, "digest": null}', b'{"index": 1.5, "digest": 2}'),
]  # fmt: skip


def test_records_of_wrong_types_are_skipped(run, begun, capsys):
    whole = run(LINES, name="whole").out.read_bytes()
    lines = begun.read_bytes().splitlines(keepends=True)
    begun.write_bytes(lines[0] + b"".join(record(about) for about in WRONG) + b"".join(lines[1:]))
    capsys.readouterr()
    result = run(LINES)
    assert result.code == 0 and result.out.read_bytes() == whole and len(result.engine.ran) == 2
    assert f"{len(WRONG)} damaged records" in capsys.readouterr().err


def test_journal_damage_during_the_job_is_reported_in_one_sentence(run, tmp_path, capsys):
    path = journal_of(tmp_path / "out.jsonl")

    def damage(engine):
        if engine.steps == 10:
            flip(path, 3)

    result = run(LINES, FakeEngine(on_step=damage))
    assert result.code == 1 and not result.out.exists()
    assert "was damaged while the job ran; run the same command again" in capsys.readouterr().err
    again = run(LINES)
    assert again.code == 0 and len(again.engine.ran) == 1


def test_a_file_of_zeros_is_what_a_power_cut_leaves(run, tmp_path):
    path = journal_of(tmp_path / "out.jsonl")
    path.write_bytes(b"\0" * 5000)
    assert run(LINES).code == 0
    path.write_bytes(b"\0" * 5000 + b"precious")
    assert run(LINES, name="out.jsonl", model={"model": "b"}).code == 1 and path.read_bytes().endswith(
        b"precious"
    )
