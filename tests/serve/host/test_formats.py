"""Files written by version 1 of each format are read, and written, to the byte."""

from pathlib import Path

from duetto.serve.host.blob_store import BlobStore
from duetto.serve.jobs.batch.journal import Header, Journal
from duetto.serve.kv.offload.disk import DiskTier
from duetto.serve.kv.offload.tier import page_key
from duetto.serve.llm.audit.chain import ChainWriter, verify_chain_lines
from duetto.serve.runtime.compiled.executable_cache import PROGRAM_FORMAT

PROGRAM = bytes.fromhex(
    "64756574746f206b65707420310acb256712c72d6e7a1a17104a6be0409b8c7db62184bba37bea5bd78c79a8085961"
    "2070726f6772616d"
)
PAGE_FILE = "75/7566dfc59939629505c2c1c98e8f2fb2cb24190b.page"
PAGE = bytes.fromhex(
    "64756574746f207061676520310abd5efeead9016cace87397053db2d666b7fe21a8a81617f9ab7d9e86b109455d6b"
    "65797320616e642076616c756573"
)
JOURNAL = (
    b'duetto-journal-1 4ab26737 {"fingerprint":{"model":"m"},"started":"2026-01-02T03:04:05",'
    b'"token":"0123456789abcdef"}\t\n'
    b'62b2bb77 {"index":1,"digest":1234567890123456789,"line":2,"products":"p"}\t{"a":1}\n'
    b'431e9dff {"index":0,"digest":7,"line":1}\t{"a":0}\n'
)
FIRST = "9c82bb48110b2d05e2d268fe656f588616bc8029f7ae786fdd4597fcd3981dcc"
LAST = "cb6f64225339b409a55034cd88342a6b5a3b75fd84dd38a5053a4aa1e7d26575"
LOG = (
    b'{"prev":"' + b"0" * 64 + b'","kind":"start","cut_off":0}\n'
    b'{"prev":"' + FIRST.encode() + b'","kind":"request","start":"' + FIRST.encode() + b'"}\n'
)
HEADER = Header({"model": "m"}, "2026-01-02T03:04:05", "0123456789abcdef")


def test_a_kept_program(tmp_path: Path):
    (tmp_path / "old").mkdir(mode=0o700)
    (tmp_path / "old" / ("ab" * 32)).write_bytes(PROGRAM)
    assert BlobStore(tmp_path / "old", PROGRAM_FORMAT, 1 << 20).read("ab" * 32) == b"a program"
    (tmp_path / "new").mkdir(mode=0o700)
    BlobStore(tmp_path / "new", PROGRAM_FORMAT, 1 << 20).write("ab" * 32, b"a program")
    assert (tmp_path / "new" / ("ab" * 32)).read_bytes() == PROGRAM


def test_a_page_on_disk(tmp_path: Path):
    key, realm, (old, new) = page_key(bytes(range(16)), 1), b"r" * 32, (tmp_path / "old", tmp_path / "new")
    (old / PAGE_FILE).parent.mkdir(parents=True)
    (old / PAGE_FILE).write_bytes(PAGE)
    assert DiskTier(old, realm, 1 << 20).fetch(key) == b"keys and values"
    DiskTier(new, realm, 1 << 20).offer(key, b"keys and values")
    assert (new / PAGE_FILE).read_bytes() == PAGE


def test_a_batch_journal(tmp_path: Path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(JOURNAL + b"torn")
    with Journal(old, Header(HEADER.fingerprint, "2027-01-01T00:00:00"), 3) as journal:
        assert (journal.header, journal.num_answered, journal.num_damaged, journal.products) == (
            HEADER,
            2,
            0,
            {"p"},
        )
        assert (
            journal.has_answer(0, 7)
            and journal.has_answer(1, 1234567890123456789)
            and not journal.has_answer(2, 0)
        )
        assert [answer for _, answer in journal.read_answers(2)] == [b'{"a":0}', b'{"a":1}']
    assert old.read_bytes() == JOURNAL
    with Journal(new, HEADER, 3) as journal:
        journal.append(1, 1234567890123456789, b'{"a":1}', {"line": 2, "products": "p"})
        journal.append(0, 7, b'{"a":0}', {"line": 1})
        journal.sync()
    assert new.read_bytes() == JOURNAL


def test_an_audit_log(tmp_path: Path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(LOG + b'{"prev":"torn')
    writer = ChainWriter(old)
    assert (writer.cut_off_bytes, writer.hash) == (13, LAST)
    writer.append({"kind": "start", "cut_off": writer.cut_off_bytes})
    writer.close()
    assert [line.hash for line in verify_chain_lines(old)][:3] == [FIRST, LAST, ""]
    assert not any(line.error for line in verify_chain_lines(old))
    writer = ChainWriter(new)
    writer.append({"kind": "start", "cut_off": 0})
    writer.append({"kind": "request", "start": FIRST})
    writer.close()
    assert new.read_bytes() == LOG and writer.hash == LAST
