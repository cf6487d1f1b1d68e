"""Batches on Ray: datasets through a processor, and jobs over actors that are killed."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from suite.strict import STRICT

from duetto import LLM
from duetto.ray import Predictor, ProcessorConfig, RayBackend, build_processor
from duetto.serve.jobs.batch.job import BatchOptions
from duetto.serve.jobs.batch.run import run_batch
from duetto.serve.jobs.workers.worker_pool import WorkerPool
from duetto.serve.options.engine import EngineOptions

pytestmark = [pytest.mark.extras, pytest.mark.minutes, pytest.mark.filterwarnings("default")]
SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_prefill_tokens": 32, "max_model_len": 128, "decode_steps": 1}
OWN: dict[str, Any] = {"use_tqdm_on_load": False, "dtype": "float32", **SIZES}
PROMPTS = ["def read(path):\n", "class Stack:\n", "import os\n", "for name in ", "    return ", "try:\n"]
LINES, FEW, KILLS = 60, 24, 2


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    found = pytest.importorskip("ray", reason="needs duetto[ray]")
    with pytest.MonkeyPatch.context() as patch:
        # else other work leaves the actors nothing of a machine
        for name, value in ({"RAY_worker_niceness": "0"} | STRICT).items():
            patch.setenv(name, value)
        found.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
        yield found
        found.shutdown()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Lines of both formats, greedy and sampled, some of them wrong."""
    path = tmp_path / "in.jsonl"
    with open(path, "w") as file:
        for i in range(LINES):
            fields = {"prompt": PROMPTS[i % 6], "max_tokens": 4 + 7 * i % 40, "temperature": i % 3 * 0.5}
            if i % 5 == 0:
                fields = {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": fields}
            file.write(json.dumps(fields) + "\n" if i % 17 else "not JSON\n")
    return path


def job(source: Path, name: str, begin: Any, in_flight: int) -> bytes:
    options = BatchOptions(in_flight=in_flight, progress=False)
    assert run_batch(begin, str(source), str(source.with_name(name)), options, {"model": "demo"}) == 0
    return source.with_name(name).read_bytes()


@pytest.mark.timeout(600)
def test_a_dataset_is_answered_by_actors(ray):
    rows = [{"text": PROMPTS[i % 6], "seed": i} for i in range(20)]
    given = {"max_tokens": 8, "ignore_eos": True}
    config = ProcessorConfig(
        engine_kwargs=OWN, concurrency=2, batch_size=5, resources={"num_cpus": 1}, sampling_params=given,
        should_continue_on_error=True,
    )  # fmt: skip
    processor = build_processor(
        config,
        lambda row: {
            "prompt": row["text"] if row["seed"] != 3 else "",
            "sampling_params": {"seed": row["seed"]},
            "seed": row["seed"],
        },
        lambda row: {"answer": row["generated_text"], "seed": row["seed"]},
    )
    predictor = Predictor(config)
    batch = {
        "prompt": [row["text"] for row in rows],
        "sampling_params": [{"seed": i} for i in range(20)],
    }
    expected = predictor(batch)["generated_text"]
    predictor.llm.close()  # its programs are stored for the actors
    dataset = import_module("ray.data").from_items(rows, override_num_blocks=4)
    found = {row["seed"]: row for row in processor(dataset).take_all()}
    assert "the prompt is empty" in found[3]["__inference_error__"]
    assert all(found[i]["answer"] == expected[i] for i in range(20) if i != 3)


def test_a_job_over_killed_actors_has_the_same_bytes(ray, source):
    with LLM(**OWN) as llm:
        tokenizer = llm.tokenizer
        expected = job(source, "one.jsonl", lambda: llm, 16)
    backend = RayBackend(OWN, {"num_cpus": 1})
    made: list[WorkerPool] = []
    ended, killed = threading.Event(), []

    def begin() -> WorkerPool:
        made.append(WorkerPool(backend, 2, tokenizer, EngineOptions(**SIZES)))
        threading.Thread(target=kill, daemon=True).start()
        return made[0]

    def kill() -> None:
        draw = random.Random(0)
        while len(killed) < KILLS and not ended.is_set():
            handle = draw.choice(made[0]._handles)
            number = backend.describe(
                handle.worker
            ).process_id  # waits until it has started, or told what has ended
            os.kill(number, signal.SIGKILL)
            killed.append(number)
            time.sleep(draw.random())

    found = job(source, "several.jsonl", begin, 32)
    ended.set()
    assert found == expected and made[0].num_lost >= 1
    print(f"{len(killed)} kills, {made[0].num_lost} actors lost")


@pytest.mark.usefixtures("ray")
def test_the_command_is_killed_and_goes_on(source):
    command = [sys.executable, "-m", "duetto", "batch", str(source), str(source.with_name("ray.jsonl"))]
    flags = ["--max-num-seqs", "4", "--max-prefill-tokens", "32", "--max-model-len", "128", "--quiet"]
    flags += ["--decode-steps", "1", "--no-progress", "--dtype", "float32"]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    journal = source.with_name("ray.jsonl.journal")
    source.write_bytes(b"".join(source.read_bytes().splitlines(True)[:FEW]))
    process = subprocess.Popen([*command, "--ray", "2", *flags], env=env, start_new_session=True)
    while process.poll() is None and not (journal.exists() and journal.read_bytes().count(b"\n") > FEW // 4):
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)  # the driver, and the cluster that it has started
    process.wait()
    assert journal.exists()
    assert subprocess.run([*command, "--ray", "2", *flags], env=env, check=False).returncode == 0
    alone = [*command[:-1], str(source.with_name("alone.jsonl")), *flags]
    assert subprocess.run(alone, env=env, check=False).returncode == 0
    assert source.with_name("ray.jsonl").read_bytes() == source.with_name("alone.jsonl").read_bytes()
