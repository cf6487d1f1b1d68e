"""One model served by two processes: they are started as a user's are, and their tokens are those of one."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases.text.letters import backend_of
from fakes.processes import Forked, script
from fakes.processes import command as duetto
from suite.fixtures import Model

from duetto import SamplingParams
from duetto.checkpoints.huggingface import save_hf
from duetto.serve.runtime.multihost.supervisor import LOST_EXIT_CODE, free_port

RANK = Path(__file__).with_name("rank.py")
PROMPTS = [[(k * i * i + i) % 300 for i in range(n)] for k, n in enumerate((62, 70, 3))]
SMALL: dict[str, Any] = {  # a cache of one request's length for two that run: they preempt each other
    "max_model_len": 160, "max_batched_token_mem": 160, "max_num_seqs": 2, "max_prefill_tokens": 64,
    "page_size": 16, "tensor_parallel_size": 2, "max_prefill_delay": 0.0,
}  # fmt: skip
MIXTURE = {
    "model_type": "qwen3_moe", "vocab_size": 300, "hidden_size": 48, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [],
    "max_position_embeddings": 512, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
LIMIT = 600  # seconds: a group that hangs fails a test


def start(options: dict[str, Any], devices: int = 1, ends: bool = True) -> Forked:
    given = os.environ.get("XLA_FLAGS", "")
    flags = {"XLA_FLAGS": f"{given} --xla_force_host_platform_device_count={devices}"}
    asked = json.dumps({"options": options, "prompts": PROMPTS, "ends": ends})
    return Forked(script, str(RANK), asked, more=flags)


def finished(process: Forked) -> tuple[int, str, str]:
    out, err = process.communicate(LIMIT)
    return process.wait(), out, err


def of_group(options: dict[str, Any], ends: bool = True, **second: Any) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of two ranks, of which the second may have other options."""
    both = options | {"nnodes": 2, "master_port": free_port()}
    ranks = [start(both | {"node_rank": 0}, ends=ends), start(both | {"node_rank": 1} | second)]
    return [finished(rank) for rank in ranks]


def stored(model: Model, folder: Path) -> Path:
    save_hf(folder, model.config, model.params)
    return folder


def served(options: dict[str, Any], ends: bool) -> dict[str, Any]:
    """What two processes give, which is what one with two devices gives, to the last draw."""
    own = finished(start(options, devices=2))
    assert own[0] == 0, own[2]
    ranks = of_group(options, ends)
    assert [code for code, *_ in ranks] == [0, 0], ranks
    assert ranks[1][1] == "" and "duetto" not in ranks[1][2]
    found = json.loads(ranks[0][1])
    assert len(found.pop("realm")) == 64
    for method, why in zip(("sleep", "save_cache", "update_params"), found.pop("refused"), strict=True):
        assert f"{method} is not allowed with several processes" in why
    expected = json.loads(own[1]) | {"preemptions": found["preemptions"]}  # which depend on the time
    assert found == expected
    assert found["devices"] == 2 and not found["compilations"]
    return found


def test_two_processes_serve_the_tokens_of_one(one_layer, tmp_path, oracle):
    """Under the contract and through preemptions; greedy ones are one device's too."""
    folder = stored(one_layer, tmp_path / "model")
    backend_of().save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text('{"eos_token_id": 299}')  # where a grammar ends
    found = served(SMALL | {"model": str(folder)}, ends=True)
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    assert found["0"] == [[oracle(one_layer)(prompt, greedy)] for prompt in PROMPTS]
    assert found["preemptions"] and len(found["digits"]) == 6 and found["digits"].isdigit()


NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}


@pytest.mark.minutes
@pytest.mark.parametrize("others", [{}, NGRAM], ids=["alone", "guesses"])
def test_experts_over_two_processes(others: dict[str, Any], tmp_path):
    """Random weights in int8, experts whole on one process each; nobody closes the LLM."""
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    options = SMALL | {"model": str(tmp_path), "load_format": "dummy", "quantization": "int8"}
    served(options | {"enable_expert_parallel": True, "reproducible": False} | others, ends=False)


def test_processes_that_would_not_run_the_same_are_refused(one_layer, tmp_path):
    options = SMALL | {"model": str(stored(one_layer, tmp_path / "model"))}
    ranks = of_group(options, page_size=32)
    assert [code for code, *_ in ranks] == [1, 1]
    assert all("page_size is 32 in rank 1 and 16 in rank 0" in err for *_, err in ranks)


def test_other_weights_are_refused(one_layer, tmp_path):
    """Also those that no device has whole."""
    ours, theirs = stored(one_layer, tmp_path / "a"), tmp_path / "b"
    save_hf(theirs, one_layer.config, replace(one_layer.params, embed=one_layer.params.embed + 1))
    ranks = of_group(SMALL | {"model": str(ours)}, model=str(theirs))
    assert ranks[0][0] == 1 and "files of the model of rank 1 are others than of rank 0" in ranks[0][2]
    assert ranks[1][0] in (0, 1) and "Traceback" not in ranks[1][2]  # nobody could take it up there


# ---------------------------------------------------------------- one command, and kills

FLAGS = [
    "--nnodes", "2", "--tensor-parallel-size", "2", "--max-num-seqs", "2", "--max-prefill-tokens", "64",
    "--max-model-len", "160", "--no-reproducible", "--quiet", "--no-progress",
]  # fmt: skip


class Command:
    """`duetto batch` in two processes, and what it said."""

    def __init__(self, model: Model, folder: Path, lines: int):
        self.folder, self.out, self.log = folder, folder / "out.jsonl", folder / "log"
        self.journal = folder / "out.jsonl.journal"
        source, requests = folder / "in.jsonl", random.Random(1)
        with open(source, "w") as file:
            for i in range(lines):
                prompt = [requests.randrange(300) for _ in range(requests.randrange(3, 60))]
                file.write(
                    json.dumps({"prompt": prompt, "max_tokens": 30, "temperature": i % 2 * 0.8}) + "\n"
                )
        stored(model, folder / "model")

    def words(self, out: Path) -> list[str]:
        given = [str(self.folder / "in.jsonl"), str(out), "--model", str(self.folder / "model")]
        return ["batch", *given, *FLAGS]

    def start(self, out: Path, *more: str) -> subprocess.Popen[Any]:
        command = [sys.executable, "-m", "duetto", *self.words(out), *more]
        with open(self.log, "w") as log:
            return subprocess.Popen(
                command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, stdout=log, stderr=log
            )

    def ended(self, process: subprocess.Popen[Any]) -> int:
        try:
            return process.wait(LIMIT)
        finally:
            process.kill()

    def answered(self, out: Path) -> bytes:
        assert self.ended(self.start(out)) == 0, self.log.read_text()
        return out.read_bytes()

    def size(self) -> int:
        return self.journal.stat().st_size if self.journal.exists() else 0


def children(process: subprocess.Popen[Any] | Forked) -> list[int]:
    """The ranks that a command has started, by their numbers."""
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False)
    return sorted(map(int, found.stdout.split()))


def kill_in_turn(process: subprocess.Popen[Any], command: Command, kills: int) -> list[int]:
    """Kill one rank after the other: most when answers have come, some at any moment; gives those killed."""
    chance, killed = random.Random(3), []
    while len(killed) < kills and process.poll() is None:
        before, ranks = command.size(), children(process)
        if len(ranks) < 2:
            time.sleep(0.05)
            continue
        until = time.monotonic() + LIMIT
        at_once = len(killed) % 4 == 3
        while process.poll() is None and command.size() == before and time.monotonic() < until:
            time.sleep(chance.uniform(0, 4) if at_once else 0.01)
            if at_once:
                break
        ranks = children(process)
        if len(ranks) == 2:
            victim = len(killed) % 2
            os.kill(ranks[victim], signal.SIGKILL)
            killed.append(victim)
            while set(children(process)) & set(ranks) and process.poll() is None:
                time.sleep(0.02)
    return killed


@pytest.mark.full
@pytest.mark.parametrize(
    "lines, kills", [(12, 2), pytest.param(120, 20, marks=pytest.mark.minutes)], ids=["two", "twenty"]
)
def test_a_batch_with_killed_ranks_ends_with_the_same_bytes(one_layer, lines: int, kills: int, tmp_path):
    command = Command(one_layer, tmp_path, lines)
    expected = command.answered(tmp_path / "whole.jsonl")
    assert expected.count(b"\n") == lines
    process = command.start(command.out)
    killed = kill_in_turn(process, command, kills)
    assert command.ended(process) == 0 and len(killed) == kills, command.log.read_text()
    assert command.out.read_bytes() == expected and not command.journal.exists()
    assert command.log.read_text().count("the processes start again") == kills


@pytest.mark.full
def test_an_error_of_the_ranks_ends_the_command(one_layer, tmp_path):
    """A usage error, and a batch that cannot be written, are said once and not tried again."""
    command = Command(one_layer, tmp_path, 2)
    assert command.ended(command.start(tmp_path / "out", "--page-size", "48")) == 1
    said = command.log.read_text()
    assert "page_size" in said and "start again" not in said
    (tmp_path / "there").write_text("somebody's")
    assert command.ended(command.start(tmp_path / "there")) == 1
    said = command.log.read_text()
    assert "remove it or choose another output" in said and "start again" not in said
    assert (tmp_path / "there").read_text() == "somebody's"


def test_ranks_end_with_the_command(one_layer, tmp_path):
    command = Command(one_layer, tmp_path, 40)
    process = Forked(duetto, *command.words(command.out), heard=())
    while not (ranks := children(process)) or command.size() == 0:
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    until = time.monotonic() + LIMIT
    while any(map(alive, ranks)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(alive, ranks)) and LOST_EXIT_CODE == 75


def alive(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


MEASURING = """
import sys
from duetto import LLM
from duetto.serve.engine.startup import dtype

dtype.bfloat16_gain = lambda *_: float(sys.argv[4])
with LLM(
    sys.argv[2], max_model_len=64, max_num_seqs=1, max_prefill_tokens=16, tensor_parallel_size=2,
    reproducible=False, nnodes=2, node_rank=int(sys.argv[3]), master_port=int(sys.argv[1]),
) as llm:
    print(llm.report()["dtype"])
"""


@pytest.mark.full
@pytest.mark.parametrize(("gains", "chosen"), [((2.0, 0.5), "bfloat16"), ((0.5, 2.0), "float32")])
def test_rank_0_chooses_the_dtype_of_all(one_layer, gains: tuple[float, float], chosen: str, tmp_path):
    """Whatever the other measures of its own machine."""
    save_hf(tmp_path, one_layer.config, one_layer.params, "bfloat16")
    (tmp_path / "rank.py").write_text(MEASURING)
    given = str(free_port()), str(tmp_path)
    ranks = [
        Forked(script, str(tmp_path / "rank.py"), *given, str(rank), str(gain))
        for rank, gain in enumerate(gains)
    ]
    (first, out, said), (second, _, other) = map(finished, ranks)
    assert (first, second, out.strip()) == (0, 0, chosen), said + other
