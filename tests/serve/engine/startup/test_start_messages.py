"""What a start says on standard error, and that it can be silenced, or closed, without harm."""

import io
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from duetto import LLM
from duetto.cpu_kernels.library import KernelLibrary
from duetto.model.weights import device_forms
from duetto.serve.cli import common as command
from duetto.serve.cli import main as cli
from duetto.serve.engine.startup import start as loading
from duetto.serve.engine.startup.model_folder import DEMO_FOLDER, load_folder
from duetto.serve.host import progress
from duetto.serve.jobs.batch.fingerprint import job_fingerprint
from duetto.serve.llm import llm
from duetto.serve.options.engine import EngineOptions
from duetto.serve.runtime.compiled import executable_cache
from duetto.serve.runtime.compiled.futures import SplitStep
from duetto.serve.runtime.compiled.lowering import LocalLowering, StepArguments
from duetto.serve.runtime.compiled.program_table import ProgramTable, compiling_message
from duetto.serve.runtime.compiled.shapes import CanonicalShapes, Shape, Sizes
from duetto.serve.runtime.compiled.small_programs import SmallPrograms
from duetto.serve.runtime.equal_bits import classes
from duetto.serve.runtime.steps.phases import TargetOnly


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(9, "Bad file descriptor")


def tell(monkeypatch, stderr, total: int = 3, patience: float = 0.0) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    with progress.show_stage("compiling", total, patience) as done:
        for i in range(total):
            assert done(i) == i


def test_plain_lines_are_few(monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 600.0)
    tell(monkeypatch, log := io.StringIO(), total=500)
    assert log.getvalue().splitlines() == ["duetto: compiling: 0/500", "duetto: compiling: 500/500"]


def test_plain_lines_go_on_while_a_stage_does(monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    tell(monkeypatch, log := io.StringIO())
    assert [line[-3:] for line in log.getvalue().splitlines()] == ["0/3", "1/3", "2/3", "3/3"]


Notebook = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})


@pytest.mark.parametrize("kind", [Terminal, Notebook])
def test_a_terminal_or_notebook_has_one_line_that_is_rewritten(monkeypatch, kind):
    tell(monkeypatch, log := kind())
    assert log.getvalue() == "".join(f"\rduetto: compiling: {i}/3" for i in range(4)) + "\n"


@pytest.mark.parametrize("total, patience", [(0, 0.0), (3, 600.0)])
def test_quick_or_empty_stages_print_nothing(monkeypatch, total, patience):
    tell(monkeypatch, log := io.StringIO(), total, patience)
    assert log.getvalue() == ""


def test_silenced_starts_print_nothing(monkeypatch):
    with progress.progress_enabled(False):
        tell(monkeypatch, log := io.StringIO())
    assert log.getvalue() == ""
    tell(monkeypatch, log)
    assert log.getvalue()


@pytest.mark.parametrize("stderr", [None, Closed(), "closed"])
def test_a_closed_standard_error_is_no_error(monkeypatch, stderr):
    if stderr == "closed":
        stderr = io.StringIO()
        stderr.close()
    tell(monkeypatch, stderr)


def test_a_stage_that_fails_ends_its_line(monkeypatch):
    monkeypatch.setattr(sys, "stderr", log := Terminal())
    with pytest.raises(KeyboardInterrupt), progress.show_stage("compiling", 3) as done:
        done(0)
        raise KeyboardInterrupt
    assert log.getvalue().endswith("1/3\n")


def test_threads_count_together(monkeypatch):
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    with progress.show_stage("compiling", 400) as done:
        threads = [threading.Thread(target=lambda: [done(0) for _ in range(50)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert log.getvalue().endswith("400/400\n")


# ------------------------------------------------------------ a start


@pytest.fixture
def folder(tmp_path):
    names = "jax_compilation_cache_dir", "jax_compilation_cache_max_size"
    before = {name: jax.config.values[name] for name in names}
    yield tmp_path
    compilation_cache.reset_cache()
    for name, value in before.items():
        jax.config.update(name, value)


SEATS = jax.jit(lambda: 0).lower()
SIZES = Sizes(max_model_len=96, max_num_seqs=8, pages=(16,), page_size=64)
SHAPES = Shape("prefill", 1, 64), Shape("decode", 8, 1), Shape("verify", 8, 4)
CANONICAL = CanonicalShapes(*SHAPES[:2])


def test_missing_programs_are_announced_and_stored_ones_are_not(tiny, folder, monkeypatch, capfd):
    there: set[str] = set()
    monkeypatch.setattr(executable_cache, "executable_key", lambda phases, phase, *_: phase)
    monkeypatch.setattr(executable_cache, "load_program", lambda key, *_: key if key in there else None)
    monkeypatch.setattr(executable_cache, "compile_and_store", lambda key, *_: key)
    monkeypatch.setattr(LocalLowering, "lower", lambda *_: SEATS)
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 600.0)
    monkeypatch.setattr(LocalLowering, "lower_small", lambda _: SmallPrograms(*[SEATS] * 5))
    jax.config.update("jax_compilation_cache_dir", str(folder))

    lowering = LocalLowering.from_params(TargetOnly(tiny.config), tiny.params, SIZES)

    def start() -> list[str]:
        made: Any = ProgramTable(lowering, SHAPES)
        assert list(made.steps.values()) == [SplitStep("forward", "sample"), "decode", "verify"]
        return capfd.readouterr().err.splitlines()

    line = "duetto: compiling 4 programs, kept for the next start: "
    assert start() == [f"{line}0/4", f"{line}4/4"]
    there |= {"forward", "verify", "sample"}
    assert start()[-1] == "duetto: compiling 1 program, kept for the next start: 1/1"
    there |= {"decode"}
    assert start() == []
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0.0)
    assert start()[-1] == "duetto: reading kept programs: 4/4"


@pytest.mark.full
def test_unused_cpu_kernels_are_reported(tiny, monkeypatch, capfd):
    def stop(options: EngineOptions, *_: Any) -> None:
        assert not options.cpu_kernels
        raise InterruptedError

    monkeypatch.setattr(device_forms, "load_library", lambda: KernelLibrary(("avx2",)))
    monkeypatch.setattr(loading, "engine_shapes", stop)
    params = jax.tree.map(lambda x: x.astype("float16"), tiny.params)
    with pytest.raises(InterruptedError):
        loading.start_engine(tiny.config, params, EngineOptions(cpu_kernels=True))
    assert "duetto: cpu_kernels has no effect: " in capfd.readouterr().err


def test_deferred_compilations_are_reported(tiny, monkeypatch, capfd):
    monkeypatch.setattr(executable_cache, "load_program", lambda *_: None)
    monkeypatch.setattr(executable_cache, "compile_and_store", lambda key, *_: key or "compiled")
    monkeypatch.setattr(LocalLowering, "lower", lambda *_: SEATS)
    monkeypatch.setattr(LocalLowering, "lower_small", lambda _: SmallPrograms(*[SEATS] * 5))
    lowering = LocalLowering.from_params(TargetOnly(tiny.config), tiny.params, SIZES)
    made: Any = ProgramTable(lowering, SHAPES, SHAPES[:2])
    assert (
        tuple(made.steps) == SHAPES[:2]
        and made.missing == [SHAPES[2]]
        and set(made.ready_seconds) == {*SHAPES[:2]}
    )
    assert capfd.readouterr().err.splitlines()[-1].endswith("; 1 more while they serve: 3/3")
    made.add(SHAPES[2])
    assert tuple(made.steps) == SHAPES and set(made.ready_seconds) == {*SHAPES}  # two threads compile


class Silent(SimpleNamespace):
    """A probe without programs, whose shapes all agree."""

    def __init__(self, *_: Any):
        super().__init__(
            needed_pages=1,
            run=lambda arguments, pages, work: (work(self), arguments),
            matches_canonical=lambda shape: True,
            does_prefill_match_decode=lambda: True,
            time_step=lambda shape, tokens: 1.0,
        )


FAKE = SimpleNamespace(programs=SimpleNamespace(sizes=SIZES, steps=dict.fromkeys(SHAPES)))


@pytest.mark.usefixtures("unchecked")  # its programs are fakes
def test_probing_is_reported(monkeypatch, capfd):
    monkeypatch.setattr(classes, "Probe", Silent)
    found, _ = classes.probe_classes(FAKE, StepArguments(None, None, None), CANONICAL)
    assert found == classes.ShapeClasses.from_shapes(SHAPES, same_bits=True)
    line = "duetto: probing which programs give the same bits: "
    assert capfd.readouterr().err.splitlines() == [f"{line}0/3", f"{line}3/3"]


def test_only_stored_programs_are_reported_as_stored(folder):
    jax.config.update("jax_compilation_cache_dir", str(folder))
    assert compiling_message(12) == "compiling 12 programs, kept for the next start"
    jax.config.update("jax_compilation_cache_dir", None)
    assert compiling_message(1) == "compiling 1 program"


@pytest.mark.usefixtures("unchecked")  # its programs are fakes
def test_measuring_steps_is_reported(monkeypatch, capfd):
    monkeypatch.setattr(classes, "Probe", Silent)
    verify = Shape("verify", 8, 4, 8), Shape("verify", 8, 4, 16)
    found = classes.ShapeClasses((), (Shape("decode", 8, 1),), True, verify)
    seconds, _ = classes.measure_step_seconds(FAKE, StepArguments(None, None, None), CANONICAL, found, (1, 3))
    assert seconds == {(8, 0): 1.0} | {(tokens, k): 1.0 for tokens in (8, 16) for k in (1, 3)}
    assert "duetto: measuring steps: 5/5\n" in capfd.readouterr().err


def test_slow_loading_of_weights_is_reported(monkeypatch, capfd):
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 600.0)
    load_folder(DEMO_FOLDER, "float32")
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0.0)
    load_folder(DEMO_FOLDER, "float32")
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("duetto: reading weights: 0/") and lines[-1].startswith(
        "duetto: reading weights: "
    )


@pytest.mark.parametrize("shown", [True, False])
def test_use_tqdm_on_load_silences_a_start(tiny, monkeypatch, capfd, shown):
    class Started(Exception):
        pass

    def warm_engine(*_):
        with progress.show_stage("compiling", 1):
            raise Started

    monkeypatch.setattr(loading, "build_warm_engine", warm_engine)
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0.0)
    for start in (LLM, lambda **options: LLM.from_params(tiny.config, tiny.params, **options)):
        with pytest.raises(Started):
            start(use_tqdm_on_load=shown)
        assert bool(capfd.readouterr().err) == shown


@pytest.mark.parametrize(
    "flags, shown", [([], True), (["--quiet"], False), (["--no-progress"], False), (["--progress"], True)]
)
def test_the_flags_that_silence_a_command_silence_its_start(monkeypatch, flags, shown):
    given: dict[str, Any] = {}
    monkeypatch.setattr(llm, "LLM", lambda model, **options: given.update(options))
    command.start_llm(cli.parse_command_line(["batch", "in", "out", *flags]), EngineOptions())
    assert given["use_tqdm_on_load"] == shown


def test_silencing_a_start_keeps_the_job_fingerprint():
    jobs = [
        job_fingerprint(DEMO_FOLDER, None, "auto", EngineOptions(use_tqdm_on_load=told))
        for told in (True, False)
    ]
    assert jobs[0] == jobs[1]


# ------------------------------------------------------------ python -m duetto


def test_the_package_runs_as_a_module_also_without_standard_error():
    command = [sys.executable, "-m", "duetto", "--version"]
    for prefix in ([], ["sh", "-c", 'exec "$@" 2>&-', "sh"]):
        found = subprocess.run(
            [*prefix, *command], check=False, stdout=subprocess.PIPE, text=True, timeout=600
        )
        assert (found.returncode, found.stdout) == (0, f"duetto {cli.version('duetto')}\n")
