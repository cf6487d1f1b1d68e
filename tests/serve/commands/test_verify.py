"""`duetto verify`: an audit log proved from a terminal."""

import json

import pytest

from duetto import LLM, SamplingParams
from duetto.serve.cli import main


def test_a_log_is_proved_or_what_was_altered_is_told(tmp_path, capsys):
    log = tmp_path / "log"
    with LLM(audit_log=str(log), max_num_seqs=8, max_model_len=128, max_prefill_tokens=64) as llm:
        params = [SamplingParams(seed=i, max_tokens=8, logprobs=1) for i in range(3)]
        llm.generate(["def add(a, b):", "import ", "class A"], params, use_tqdm=False)
    assert main(["verify", str(log), "--quiet"]) == 0
    assert "3 of 3 requests have the same bits again" in capsys.readouterr().out
    lines = log.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b'"seed":', b'"seed":1')
    log.write_bytes(b"".join(lines))
    assert main(["verify", str(log), "--quiet", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["proved"] == 2 and [one["line"] for one in found["altered"]] == [3] and found["broken"]


@pytest.mark.parametrize("content", [None, b"", b"a line\n"])
def test_what_is_no_log_is_said_in_a_sentence(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "log").write_bytes(content)
    assert main(["verify", str(tmp_path / "log")]) != 0
    told = capsys.readouterr()
    assert "Traceback" not in told.err + told.out and (told.err + told.out).strip()
