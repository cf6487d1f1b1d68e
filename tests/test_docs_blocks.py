"""Code blocks of the documentation: Python runs as it stands, with what is shown below it as its output;
command lines have flags that exist. Each block that is not run has a reason here."""

import contextlib
import io
import json
import re
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from cases.adapters import write
from cases.documents import PAGES, ROOT, Block, blocks, commands, with_outputs
from cases.models import TINY
from cases.weights import drawn
from suite.marks import full_if

from duetto import LLM, SamplingParams
from duetto.checkpoints.huggingface import load_hf
from duetto.cpu_kernels.library import load_library
from duetto.model.transformer import decoder_spec
from duetto.serve.cli.main import main, parse_command_line
from duetto.serve.engine.startup.model_folder import DEMO_FOLDER
from duetto.serve.options.keywords import options_from_keywords

OWN = "a model of the reader's own"
DEVICES = "several devices: tests/devices/ runs these layouts"
CLUSTER = "needs Ray, Spark or Dask: tests/serve/jobs/workers/ runs duetto.ray"
# By page, and the beginning of the block.
NOT_RUN = {
    "docs/checkpoints.md": {"from duetto.checkpoints import": DEVICES, "from flax import nnx": OWN},
    "docs/cluster.md": {
        "from duetto import LLM": DEVICES,
        "import ray": CLUSTER,
        "def answers(frames)": CLUSTER,
        "from functools import cache": CLUSTER,
    },
    "docs/families.md": {"def config(raw": OWN},
    "docs/parallelism.md": {
        "from duetto import LLM": DEVICES,
        'llm = LLM("folder", data_parallel_size=8': DEVICES,
        'llm = LLM("folder", pipeline_parallel_size=4': DEVICES,
        'llm = LLM("folder", experimental_ffn_devices=1': DEVICES,
    },
    "docs/ray.md": dict.fromkeys(
        ("from duetto.ray.serve import", "config = LLMConfig("), "test_ray_serve.py runs duetto.ray.serve"
    ),
    "docs/tunix.md": dict.fromkeys(
        ("from functools import partial", "from tunix.rl import common"), "test_tunix.py runs both"
    ),
    "docs/serving.md": {"from openai import": "tests/serve/server/http/test_documented_requests.py runs it"},
    "docs/training.md": {} if load_library().isas else dict.fromkeys(
        ("import jax", "from duetto.train import", "answer = "), load_library().refusal
    ),
}  # fmt: skip
# Text that is not compared.
SHOWN = {
    "README.md": {"33 requests, 334 prompt": "times of a run", "$ duetto plan": "needs the extra `targets`"},
    "docs/architecture.md": {"serve    ": "a list of packages"},
    "docs/reproducibility.md": {"$ duetto serve DIR": "tests/serve/cli/test_verify.py runs it"},
}
FOREIGN = {"(umask", "cd", "curl", "for", "git", "helm", "kubectl", "lm_eval", "mike", "rm", "sed"}


def reason(table: dict[str, dict[str, str]], block: Block) -> str | None:
    """What a table says of a block, if it has it."""
    rows = table.get(block.page, {}).items()
    return next((why for beginning, why in rows if block.text.startswith(beginning)), None)


PYTHON = [
    page
    for page in PAGES
    if any(block.language == "python" and not reason(NOT_RUN, block) for block in blocks(page))
]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_what_is_not_run_is_there():
    for table, languages in ((NOT_RUN, ("python",)), (SHOWN, ("text",))):
        for page, rows in table.items():
            texts = [block.text for block in blocks(ROOT / page) if block.language in languages]
            assert [row for row in rows if not any(text.startswith(row) for text in texts)] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_has_a_language_that_is_run_or_checked(page: Path):
    for block in blocks(page):
        assert block.language in ("python", "sh", "text", "json", "yaml", "dockerfile"), block
    outputs = {shown for one, shown in with_outputs(page) if one.language in ("python", "sh")}
    for block in blocks(page):
        assert block.language != "text" or block in outputs or reason(SHOWN, block), block


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a reader has before the first block of a page."""
    monkeypatch.chdir(tmp_path)
    demo, _ = load_hf(DEMO_FOLDER, jnp.float32)
    for seed, adapter in enumerate(("sql", "de")):
        write(tmp_path / adapter, demo, rank=4, seed=seed)
    asked = {"prompts": ["import "], "prompt": "import ", "answer_ids": [5, 6]}
    own = {"config": TINY, "params": drawn(decoder_spec(TINY))}
    return asked | own | {"train": lambda params, answers: params}


@full_if(lambda page: page.stem != "quickstart")
@pytest.mark.usefixtures("steady_steps", "few_shapes")
@pytest.mark.parametrize("page", PYTHON, ids=name)
def test_python_runs_and_prints_what_the_page_shows(page: Path, prepared: dict[str, Any]):
    for block, shown in with_outputs(page):
        if block.language == "python" and not reason(NOT_RUN, block):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(replaced(block), f"{block.page}:{block.line}", "exec"), prepared)  # noqa: S102
            if shown is not None:
                assert stripped(printed.getvalue()) == stripped(shown.text)
    for value in prepared.values():
        if isinstance(value, LLM):
            value.close()


def replaced(block: Block) -> str:
    """A block over the model that ships."""
    text = re.sub(r'LLM\(\s*"(folder|Qwen/Qwen3-0.6B|demo)"', f'LLM("{DEMO_FOLDER}"', block.text)
    return text.replace('model="demo"', f'model="{DEMO_FOLDER}"').replace("/adapters/", "")


def stripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_command_lines_have_flags_targets_and_extras_that_exist(page: Path):
    for block in blocks(page):
        if block.language == "sh":
            for words in commands(block):
                check(words)


def check(words: list[str]) -> None:
    """Fail for a command line that could not begin."""
    words = words[1:] if re.match(r"[A-Z_]+=", words[0]) else words
    program, rest = words[0].rpartition("bin/")[2], words[1:]
    if program == "duetto":
        if not rest[0].startswith("--"):
            parse_command_line(rest)
    elif program == "make":
        assert all(word in TARGETS for word in rest if "=" not in word), words
    elif "install" in rest:
        for extras in re.findall(r"(?:duetto|\.)\[([\w,]+)\]", " ".join(rest)):
            assert set(extras.split(",")) <= EXTRAS.keys(), words
    elif program in ("python", "python3"):
        assert rest[0] == "-m" or (ROOT / rest[0]).exists(), words
    else:
        assert program in FOREIGN or (ROOT / program).exists(), words
    if "-d" in words:
        json.loads(words[words.index("-d") + 1])


@pytest.mark.usefixtures("few_shapes")
@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_print_what_the_page_shows(page: Path, capsys: pytest.CaptureFixture[str]):
    for block, shown in with_outputs(page):
        if block.language == "sh" and shown is not None and not reason(SHOWN, shown):
            for words in commands(block):
                assert words[0] == "duetto" and main(words[1:]) == 0
            assert stripped(capsys.readouterr().out) == stripped(shown.text)


@pytest.mark.usefixtures("few_shapes")
def test_the_documented_batch_line_has_the_documented_answer(tmp_path: Path):
    line, answer = (block.text for block in blocks(ROOT / "README.md") if block.language == "json")
    (tmp_path / "prompts.jsonl").write_text(line)
    assert main(["batch", str(tmp_path / "prompts.jsonl"), str(tmp_path / "answers.jsonl"), "--quiet"]) == 0
    assert (tmp_path / "answers.jsonl").read_text() == answer


def between(file: str, start: str, end: str) -> str:
    """The text of a page between two others that it has."""
    _, found, text = (ROOT / file).read_text().partition(start)
    assert found and end in text
    return text.partition(end)[0]


def test_the_readme_names_the_examples_of_vllm_that_run():
    """A row's path is an example, or a folder whose examples the second column names."""
    page = between("docs/vllm.md", "## Examples that run", "One more needs")
    rows = re.findall(r"^\| `(?:[^`]+/)?([^`/]*)` \| (.*)\|$", page, re.MULTILINE)
    named = [name for path, rest in rows for name in ([path] if path else re.findall(r"`(\w+)`", rest))]
    said = between("README.md", "with import and model changed:", "One needs a larger")
    assert re.findall(r"`(\w+)`", said) == named and len(named) == 25


def refused() -> list[str]:
    """What docs/vllm.md says of vLLM's examples to be refused."""
    page = (ROOT / "docs" / "vllm.md").read_text()
    _, found, table = page.partition("## Examples that do not run")
    assert found
    return re.findall(r"^\| [^|]+ \| `([^|]+)` \|", table, re.MULTILINE)


@pytest.mark.parametrize("use", refused())
def test_what_an_example_of_vllm_uses_is_refused(use: str):
    if use.startswith("from "):
        module, name = use.removeprefix("from ").split(" import ")
        with pytest.raises(ImportError, match="is not here: .*LLM"):
            getattr(import_module(module), name)
    elif use.startswith("LLM."):
        with pytest.raises(NotImplementedError):
            getattr(LLM, use.removeprefix("LLM."))(None)
    else:
        kind = {"LLM": lambda **given: options_from_keywords(given), "SamplingParams": SamplingParams}
        with pytest.raises((TypeError, ValueError)):
            eval(use, kind)
