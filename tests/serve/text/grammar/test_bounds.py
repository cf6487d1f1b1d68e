"""What compiling grammars may cost, and how it ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from cases.text.letters import letters
from cases.waiting import until
from suite.marks import full_if
from tokenizers import AddedToken

from duetto.sampling.structured import StructuredOutputsParams
from duetto.serve.text.grammar.compile_probe import CompileLimits
from duetto.serve.text.grammar.compiler import DEFAULT_LIMITS, GrammarCompiler

END, V = 256, 300
SMALL = StructuredOutputsParams(choice=["yes", "no"])
COSTLY = [  # each takes seconds and hundreds of MiB
    StructuredOutputsParams(json={"type": "integer", "multipleOf": 999979}),
    StructuredOutputsParams(regex="(x{1000}){1000}"),
    StructuredOutputsParams(
        grammar="\n".join(
            ["root ::= a20", *(f"a{i} ::= a{i - 1} a{i - 1}" for i in range(1, 21)), 'a0 ::= "x"']
        )
    ),
]
LONG_GBNF = [  # llguidance's converter takes hours for each
    'root ::= "a"' + "\n" * 1_000_000,
    "\n".join(["root ::= a0", *(f"a{i} ::= a{i + 1}" for i in range(100_000)), 'a100000 ::= "x"']),
]
SECONDS = 600.0  # a test that waits for longer has failed: beside other work the nicest process is slow


@pytest.fixture
def make() -> Iterator[Callable[..., GrammarCompiler]]:
    made: list[GrammarCompiler] = []

    def one(bounds: CompileLimits = DEFAULT_LIMITS) -> GrammarCompiler:
        made.append(GrammarCompiler(letters(None, AddedToken("<end>", special=True)), V, [END], bounds))
        return made[-1]

    yield one
    for grammars in made:
        grammars.close()


def multiple(n: int) -> StructuredOutputsParams:
    return StructuredOutputsParams(json={"type": "integer", "multipleOf": n})


@full_if(lambda asked: asked is not COSTLY[0])
@pytest.mark.parametrize("asked", COSTLY)
def test_a_costly_grammar_is_refused_by_the_option(make, asked):
    for bounds, why in (
        (
            CompileLimits(0.1, 1 << 30),
            "compiling it takes more than the 0.1 s that max_grammar_seconds allows",
        ),
        (
            CompileLimits(60.0, 24 << 20),
            "compiling it takes more than the 24 MiB that max_grammar_mib allows",
        ),
    ):
        grammars = make(bounds)
        with pytest.raises(ValueError, match=f"^structured_outputs is not allowed: {why}"):
            grammars.compile_constraint(asked, 0)
        assert grammars.compile_constraint(SMALL, 0).failure is None and not grammars.jobs


def test_a_process_that_hides_the_timers_signal_keeps_the_bound(make):
    """As profilers do: children inherit ignored and blocked signals."""
    grammars = make(CompileLimits(0.1, 1 << 30))
    handler = signal.signal(signal.SIGPROF, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPROF])
    try:
        with pytest.raises(ValueError, match=r"takes more than the 0\.1 s that max_grammar_seconds allows"):
            grammars.compile_constraint(multiple(999979), 0)
    finally:
        signal.signal(signal.SIGPROF, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.mark.parametrize("gbnf", LONG_GBNF, ids=["lines", "rules"])
def test_translating_gbnf_has_the_same_bound(make, gbnf):
    grammars = make(CompileLimits(0.1, 1 << 30))
    with pytest.raises(ValueError, match=r"takes more than the 0\.1 s that max_grammar_seconds allows"):
        grammars.compile_constraint(StructuredOutputsParams(grammar=gbnf), 0)


def test_a_request_leaves_while_the_source_of_another_is_made(make, monkeypatch):
    """Requests leave in a server's event loop, which must not wait for another request's schema."""
    grammars, begun, end = make(), threading.Event(), threading.Event()
    wanted = grammars.submit(SMALL)
    slow = lambda _: begun.set() or end.wait(SECONDS) or "start: /a/"
    monkeypatch.setattr("duetto.serve.text.grammar.compiler.grammar_source", slow)
    other = threading.Thread(target=lambda: grammars.submit(SMALL).release())
    other.start()
    assert begun.wait(SECONDS)
    leaving = threading.Thread(target=wanted.release)
    leaving.start()
    leaving.join(30.0)
    is_blocked = leaving.is_alive()
    end.set()
    other.join()
    assert not is_blocked


def test_many_choices_are_compiled(make):
    grammars = make()
    grammars.compile_constraint(StructuredOutputsParams(choice=[f"choice {i}" for i in range(50_000)]), 0)
    assert 0 < grammars.grammar_cache.cached_bytes <= DEFAULT_LIMITS.bytes


def test_kept_grammars_are_bounded_by_their_bytes(make):
    """And those that requests still have are found, kept or not."""
    grammars = make(CompileLimits(10.0, 12 << 20))
    held = grammars.compile_constraint(multiple(9973), 0)
    for n in (9967, 9949, 9941, 9931, 9929, 9923):
        grammars.compile_constraint(multiple(n), 0)
        assert 0 < grammars.grammar_cache.cached_bytes <= 12 << 20
    until(lambda: grammars.grammar_cache.alive_bytes <= 16 << 20)
    wanted = grammars.submit(multiple(9973))
    assert wanted.future.done() and wanted.future.result() is held._origin
    wanted.release()


def test_a_grammar_for_which_no_request_waits_is_dropped(make):
    grammars = make(CompileLimits(600.0, 64 << 30))
    first, second = (grammars.submit(multiple(999979)) for _ in range(2))
    assert first.future is second.future
    until(lambda: grammars.slow_lane.job is not None)
    queued = grammars.submit(multiple(999983))
    first.release()
    queued.release()
    assert grammars.slow_lane.job is not None and not second.future.done()
    second.release()
    until(lambda: not grammars.jobs)
    assert not second.future.done() and grammars.compile_constraint(SMALL, 0).failure is None


def test_small_grammars_do_not_wait_for_large_ones(make):
    grammars = make(CompileLimits(600.0, 64 << 30))
    slow = [grammars.submit(multiple(n)) for n in (999979, 999983, 999961)]
    grammars.compile_constraint(SMALL, 0)
    assert not any(wanted.future.done() for wanted in slow)
    for wanted in slow:
        wanted.release()
    until(lambda: not grammars.jobs)


def test_a_process_that_is_lost_is_replaced(make):
    grammars = make()
    grammars.compile_constraint(SMALL, 0)
    running = grammars.quick_lane.probe._running
    os.killpg(running[0].pid, signal.SIGKILL)
    assert grammars.compile_constraint(StructuredOutputsParams(regex="a+"), 0).failure is None


def test_large_grammars_wait_for_memory_of_others(make):
    """Unless the thread that wants one makes requests ahead of those that give it back."""
    most = 40 << 20
    grammars = make(CompileLimits(60.0, most))
    held = [grammars.compile_constraint(multiple(n), 0) for n in range(39_970, 39_990, 2)]
    assert grammars.grammar_cache.alive_bytes > 2 * most >= 2 * grammars.grammar_cache.cached_bytes
    wanted = grammars.submit(multiple(39_989))
    time.sleep(1.0)
    assert not wanted.future.done()
    held.clear()
    assert 8 << 20 < wanted.future.result(SECONDS).bytes <= most
    wanted.release()


OWNER = f"""
import sys, time
sys.path[:0] = {[str(Path(__file__).resolve().parents[3])]!r}
from cases.text.letters import letters
from tokenizers import AddedToken
from duetto.sampling.structured import StructuredOutputsParams
from duetto.serve.text.grammar.compiler import GrammarCompiler
grammars = GrammarCompiler(letters(None, AddedToken("<end>", special=True)), {V}, [{END}])
grammars.compile_constraint(StructuredOutputsParams(choice=["yes"]), 0)
print(grammars.quick_lane.probe._running[0].pid, "jax" in sys.modules, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="processes are looked for in /proc")
def test_the_process_ends_with_a_server_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        with closing(owner.stdout):
            pid, has_jax = owner.stdout.readline().split()
            owner.kill()
    assert has_jax == "False"
    until(lambda: not is_running(pid))


def is_running(pid: str) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"
