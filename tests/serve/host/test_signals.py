"""The process and its surroundings: standard streams that are closed or lose their reader, and Ctrl-C at any
time."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fakes.batch import LINES, MODEL, FakeEngine, runner

from duetto.serve.cli.main import main
from duetto.serve.host.signals import Interrupted, Interrupts, install_exit_handler, restore_interrupt_handler
from duetto.serve.jobs.batch.job import BatchOptions
from duetto.serve.jobs.batch.run import run_batch

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
# A caller in the background has Ctrl-C ignored, and so would its children.
DEFAULT = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


@pytest.fixture
def run(tmp_path):
    return runner(tmp_path)


def python(code: str, *words: str, **named) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", code, *words]
    return subprocess.run(
        line, capture_output=True, text=True, timeout=600, check=False, env=ENVIRONMENT, **named
    )


# ---------------------------------------------------------------- closed streams


def test_with_all_standard_streams_closed_a_job_finishes(tmp_path):
    """Its lines need no engine. Without numbers kept free, the journal would be opened as number 0, 1 or
    2."""
    (tmp_path / "in").write_text('{"prompt": 3}\nnot JSON\n')
    command = f'exec {sys.executable} -m duetto batch "$0/in" "$0/out" <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", command, str(tmp_path)], timeout=600, check=False, env=ENVIRONMENT)
    assert done.returncode == 0
    assert (tmp_path / "out").read_bytes().count(b"error") == 2
    assert {p.name for p in tmp_path.iterdir()} == {"in", "out", "out.report.json"}


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- 2>&-", "<&- >&- 2>&-"])
def test_no_file_gets_the_descriptor_of_a_closed_stream(tmp_path, closed):
    """And what a library writes to standard error does not land in it."""
    code = (
        "import os, sys; from duetto.serve.host.streams import fill_closed_streams, print_stderr\n"
        "fill_closed_streams()\n"
        "file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT); os.write(2, b''); print_stderr('unheard')\n"
        "sys.stderr.write('unheard'); os._exit(file < 3)"
    )
    command = f'exec {sys.executable} -c "$1" "$0" {closed}'
    line = ["sh", "-c", command, str(tmp_path / "file"), code]
    assert (
        subprocess.run(line, timeout=600, check=False, env=ENVIRONMENT, stderr=subprocess.DEVNULL).returncode
        == 0
    )
    assert (tmp_path / "file").read_bytes() == b""


def test_without_standard_error_a_job_runs_as_ever(run, monkeypatch):
    whole = run(LINES, name="whole").out.read_bytes()
    monkeypatch.setattr(sys, "stderr", None)
    out = run(LINES, name="o2").out
    assert out.read_bytes() == whole


@pytest.mark.parametrize(("stream", "words"), [("stdout", ("IN", "-")), ("stdin", ("-", "OUT"))])
def test_a_needed_stream_that_is_closed_is_one_sentence(tmp_path, monkeypatch, capsys, stream, words):
    (tmp_path / "in").write_text('{"prompt": "a"}\n')
    source, output = (
        w.replace("IN", str(tmp_path / "in")).replace("OUT", str(tmp_path / "o")) for w in words
    )
    monkeypatch.setattr(sys, stream, None)
    assert run_batch(FakeEngine, source, output, BatchOptions(progress=False), MODEL) == 1
    assert "is closed" in capsys.readouterr().err


def test_generate_without_standard_output_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["generate", "x"]) == 1 and "standard output is closed" in capsys.readouterr().err


# ---------------------------------------------------------------- readers who leave


@pytest.fixture
def broken(monkeypatch):
    """Standard error as a pipe whose reader has left."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        yield
        monkeypatch.undo()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, write)
        os.close(null)


def test_a_job_whose_messages_nobody_reads_finishes(run, tmp_path, broken):
    (tmp_path / "in").write_text('{"prompt": "a"}\n' * 3)
    out = tmp_path / "out"
    assert run_batch(FakeEngine, str(tmp_path / "in"), str(out), BatchOptions(progress=True), MODEL) == 0
    assert out.read_bytes().count(b"\n") == 3


def test_a_closed_output_pipe_ends_a_batch(tmp_path):
    """The command line makes 141 of it, the exit code of a program that SIGPIPE ended."""
    (tmp_path / "in").write_text('{"prompt": "a"}\n')
    read, write = os.pipe()
    os.close(read)
    kept = os.dup(1)
    os.dup2(write, 1)
    try:
        with pytest.raises(BrokenPipeError):
            run_batch(FakeEngine, str(tmp_path / "in"), "-", BatchOptions(progress=False), MODEL)
    finally:
        os.dup2(kept, 1)
        for descriptor in (kept, write):
            os.close(descriptor)


# ---------------------------------------------------------------- Ctrl-C


def test_ctrl_c_while_modules_are_imported_is_one_line():
    """The import is that of the command line; a module that swallows exceptions does not hold it up."""
    code = DEFAULT + (
        "import builtins, os\n"
        "plain = builtins.__import__\n"
        "def slow(name, *rest, **named):\n"
        "    if name == 'argparse':\n"
        "        try: os.kill(os.getpid(), signal.SIGINT)\n"
        "        except BaseException: pass\n"
        "    return plain(name, *rest, **named)\n"
        "from duetto.__main__ import main\n"
        "builtins.__import__ = slow\n"
        "main()\n"
    )
    done = python(code, "generate", "x")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "duetto: interrupted\n")


def test_a_started_command_raises_keyboard_interrupt():
    """The handler of the start gives way to KeyboardInterrupt, and what others have set is left alone."""
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        install_exit_handler()
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        restore_interrupt_handler()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        install_exit_handler()
        restore_interrupt_handler()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_that_somebody_swallowed_counts_at_the_next_step(run, capsys):
    def swallow(engine):
        if engine.steps == 3:
            with contextlib.suppress(BaseException):
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)  # the second does not wait for the step

    result = run(LINES, FakeEngine(on_step=swallow), in_flight=4)
    assert result.code == 130 and result.engine.closed
    assert "6 of 13 lines are answered and kept" in capsys.readouterr().err


def test_an_interrupt_swallowed_while_the_model_is_loaded_counts_afterwards(run, tmp_path, capsys):
    def start():
        with contextlib.suppress(BaseException):
            signal.raise_signal(signal.SIGINT)
        return FakeEngine()

    (tmp_path / "in").write_text('{"prompt": "a"}\n')
    code = run_batch(start, str(tmp_path / "in"), str(tmp_path / "out"), BatchOptions(progress=False), MODEL)
    assert code == 130 and "interrupted" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_line_that_is_being_submitted_is_submitted_whole(run, monkeypatch):
    """A first signal waits for it, as for a step: else the engine would hold what the job does not know
    of."""
    engine = FakeEngine()
    plain = engine.add_request

    def add_request(prompt, params, request_id, lora_request=None):
        signal.raise_signal(signal.SIGTERM)
        plain(prompt, params, request_id)

    engine.add_request = add_request
    assert run(LINES, engine).code == 143 and len(engine.queue) == 1


def test_outside_the_main_thread_nothing_is_handled():
    found = []

    def work():
        with Interrupts() as interrupts, interrupts.defer_signals():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM)]
    assert issubclass(Interrupted, BaseException) and not issubclass(Interrupted, Exception)
