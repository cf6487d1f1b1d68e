"""An audit log: what was served is proved, and whatever is altered in it is found."""

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cases.requests import GREEDY, PARAMS, PROMPTS, SEEDED, SIZES, exact
from suite.fixtures import with_few_shapes

from duetto import LLM, SamplingParams
from duetto.serve.host.append_log import AppendLog
from duetto.serve.jobs.verify.claims import Claims
from duetto.serve.jobs.verify.replay import LogVerifier
from duetto.serve.jobs.verify.verdict import VerificationReport
from duetto.serve.llm.audit import chain
from duetto.serve.llm.audit.chain import ChainWriter, hash_line
from duetto.serve.llm.audit.facts import contract_exceptions, hash_weights
from duetto.serve.llm.audit.log import AuditLog
from duetto.serve.options.engine import EngineOptions

SCORED = SamplingParams(
    temperature=0.7, seed=2**40 + 1, logit_bias={5: 2.0}, prompt_logprobs=1, max_tokens=8, stop_token_ids=[9]
)
SEVERAL = SamplingParams(n=2, temperature=1.2, top_p=0.9, top_k=40, min_p=0.01, min_tokens=2, max_tokens=8)
LONG = replace(GREEDY, max_tokens=40, ignore_eos=True)
MANY = [*zip(PROMPTS, PARAMS, strict=True), (PROMPTS[1], SCORED), (PROMPTS[1], SEVERAL)]
MANY += [(list(range(a, a + 30)), LONG) for a in (3, 60, 90)]


@pytest.fixture(scope="module")
def served(tiny, tmp_path_factory) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The log of a load with an abort and a swap in it, and what was answered; the cache is so small that
    requests are preempted."""
    log = tmp_path_factory.mktemp("audit") / "log"
    doubled = jax.tree.map(lambda x: x * jnp.asarray(1.25, x.dtype), tiny.params)
    told: dict[str, Any] = {}
    options = SIZES | {"max_model_len": 128, "max_batched_token_mem": 128, "max_num_seqs": 4}
    with with_few_shapes(), LLM.from_params(tiny.config, tiny.params, audit_log=str(log), **options) as llm:
        texts, params = [text for text, _ in MANY], [p for _, p in MANY]
        told["first"] = llm.generate(texts, params, use_tqdm=False)
        told["preemptions"] = llm.report()["preemptions"]
        ended = llm.add_request(PROMPTS[0], replace(SEEDED, max_tokens=50))
        kept = llm.add_request(PROMPTS[1], replace(SEEDED, max_tokens=24, prompt_logprobs=0))
        for _ in range(8):
            llm.step()
        llm.abort(ended)
        llm.update_params(doubled, mode="keep")
        found = {}
        while llm.has_unfinished_requests():
            found |= {output.request_id: output for output in llm.step()}
        told["ended"], told["kept"], told["doubled"] = found[ended], found[kept], doubled
        told["last"] = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    yield log, told


@pytest.fixture(scope="module")
def llm(tiny) -> Iterator[LLM]:
    """Another engine than the one that served."""
    with LLM.from_params(tiny.config, tiny.params, **SIZES) as llm:
        yield llm


@pytest.fixture(scope="module")
def prove(llm) -> Callable[..., VerificationReport]:
    prover = LogVerifier(llm)
    return lambda log, **how: prover.verify_claims(Claims.from_log(log), **how)


def records(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_bytes().splitlines()]


def rewritten(log: Path, found: list[dict[str, Any]]) -> Path:
    """A log with these lines, by a forger who knows of the chain."""
    log.unlink(missing_ok=True)
    writer, names = ChainWriter(log), {}
    for old in found:
        names[hash_line(json.dumps(old, separators=(",", ":"), ensure_ascii=False).encode())] = writer.hash
        record = {k: v for k, v in old.items() if k != "prev"}
        if "start" in record:
            record["start"] = names["start"]
        line = writer.append(record)
        if record["kind"] == "start":
            names["start"] = line
    writer.close()
    return log


def line_of(found: list[dict[str, Any]], **known: Any) -> dict[str, Any]:
    return next(x for x in found if all(x.get(k) == v for k, v in known.items()))


def test_a_served_load_is_proved(served, llm, prove, tiny):
    log, told = served
    assert told["preemptions"] > 0
    proof = prove(log)
    claims = proof.claims
    assert len(claims.requests) == len(MANY) + 1 + 2 + 4 and not claims.broken and not claims.cut_off
    later = {str(o.request_id) for o in told["last"]}
    swapped = {v.id for v in proof.unproved_verdicts}
    assert (
        swapped == later | {told["kept"].request_id} and not proof.altered_verdicts and proof.exit_code == 2
    )
    assert len(proof.proved_verdicts) == len(MANY) + 1 + 1
    (kept,) = (claim for claim in claims.requests if claim.entry.id == told["kept"].request_id)
    assert [span.version for span in kept.spans] == [0, 1] and kept.spans[1].first > 0
    llm.update_params(told["doubled"])
    try:
        proof = LogVerifier(llm).verify_claims(Claims.from_log(log))
    finally:
        llm.update_params(tiny.params)
    assert {v.id for v in proof.proved_verdicts} == later and not proof.altered_verdicts
    assert {v.reasons[0] for v in proof.unproved_verdicts if v.id == kept.entry.id} == {
        f"{kept.spans[0].end} of 24 tokens were made by other weights"
    }


def test_the_log_says_what_was_answered(served):
    log, told = served
    found = records(log)
    for output in told["first"]:
        for one in output.outputs:
            entry = line_of(found, id=output.request_id, index=one.index)
            assert entry["tokens"] == one.token_ids and entry["prompt"] == output.prompt_token_ids
            assert entry["finish_reason"] == one.finish_reason
            if one.logprobs:
                own = zip(one.token_ids, one.logprobs, strict=True)
                assert entry["scores"]["logprobs"] == [at[t].logprob for t, at in own]
    assert line_of(found, id=told["ended"].request_id)["finish_reason"] == "abort"


def test_nothing_changes_with_a_log(served, llm):
    _, told = served
    assert exact(told["first"][:4]) == exact(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


FORGED = {
    "a token": (lambda e: e["tokens"].__setitem__(3, (e["tokens"][3] + 1) % 200), "token 3"),
    "a seed": (lambda e: e.__setitem__("seed", e["seed"] + 1), "token "),
    "a log-probability": (lambda e: e["scores"]["logprobs"].__setitem__(2, -1.5), "log-probability 2"),
    "an alternative": (lambda e: e["scores"]["top_ids"][4].__setitem__(1, 1), "log-probability 4"),
    "a parameter": (lambda e: e["params"].__setitem__("temperature", 0.0), "token "),
    "its end": (lambda e: e.__setitem__("finish_reason", "stop"), "finish_reason"),
    "a token of another model": (lambda e: e["tokens"].__setitem__(0, 10**6), "token id 1000000"),
    "a parameter that is none": (lambda e: e["params"].__setitem__("mood", 1), "what was asked"),
}


IMPOSSIBLE: dict[str, dict[str, Any]] = {  # by what is found
    "no tokens": {"tokens": []},
    "weights from tokens [3]": {"weights": [[3, 0]]},
    "weights from tokens [-4]": {"weights": [[-4, 0]]},
    "weights from tokens [0, 999]": {"weights": [[0, 0], [999, 0]]},
    "weights from tokens []": {"weights": []},
    "seed -1": {"seed": -1},
    "lengths: ": {"score_from": -3},
    "what was asked: bad_words": {"bad_words": [[10**6]]},
}


def test_a_line_that_no_engine_can_have_written(served, prove, tmp_path):
    """Is found without running it: what has no tokens, or hides some, is not proved, and none stops the
    proof of others."""
    found = records(served[0])[:5]
    seeded = line_of(found, seed=7)
    long = seeded | {"end": 10**6}
    proof = prove(rewritten(tmp_path / "log", [found[0], *(seeded | x for x in IMPOSSIBLE.values()), long]))
    told = [verdict.differences[0] for verdict in proof.altered_verdicts]
    assert len(told) == len(IMPOSSIBLE) and all(map(str.startswith, told, IMPOSSIBLE))
    (unproved,) = proof.unproved_verdicts
    assert "max_model_len" in unproved.reasons[0]


def test_given_tokens_of_a_request_are_reported(served, prove, tmp_path):
    """A forger may say so of what was made here; then nobody has proved them."""
    found = records(served[0])[:5]
    seeded = line_of(found, seed=7)
    seeded |= {"known": 3, "weights": [[3, 0]]}
    proof = prove(rewritten(tmp_path / "log", found))
    assert proof.exit_code == 0 and proof.to_record()["given"] == 3
    assert "of 1 of these 3 tokens came with the request, and are not proved" in [*proof.format_lines()]


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_line_is_found_by_its_bits(served, prove, tmp_path, what):
    """Also where the chain was forged with it."""
    found, (forge, where) = records(served[0])[:5], FORGED[what]
    seeded = line_of(found, seed=7)
    forge(seeded)
    proof = prove(rewritten(tmp_path / "log", found))
    (verdict,) = proof.altered_verdicts
    assert verdict.id == seeded["id"] and verdict.differences[0].startswith(where) and proof.exit_code == 1
    assert not proof.claims.broken and f"request {seeded['id']}" in "\n".join(proof.format_lines())


def test_changed_moved_or_removed_lines_break_the_chain(served, tmp_path):
    lines, log = served[0].read_bytes().splitlines(keepends=True), tmp_path / "log"

    def broken(lines: list[bytes]) -> list[int]:
        log.write_bytes(b"".join(lines))
        return list(Claims.from_log(log).broken)

    assert broken(lines) == []
    assert broken(lines[:3] + lines[4:]) == [4]
    assert broken([*lines[:3], lines[4], lines[3], *lines[5:]]) == [4, 5, 6]
    assert broken([*lines[:3], lines[3].replace(b'"seed":', b'"seed":1'), *lines[4:]]) == [5]
    assert broken([*lines[:3], lines[3][:-30] + b"\n", *lines[4:]]) == [5], "nobody was killed there"
    assert broken(lines[:-1]) == [], "that the end was taken off is known by its hash alone"
    assert broken([lines[0].replace(b'"weights":"', b'"weights":"0'), *lines[1:]])[0] == 2


def test_weights_or_versions_of_another_log_cannot_be_proved_here(served, prove, tmp_path):
    found = records(served[0])[:4]
    other = [found[0] | {"weights": "0" * 64}, *found[1:]]
    proof = prove(rewritten(tmp_path / "log", other))
    assert (
        proof.exit_code == 2 and "tokens were made by other weights" in proof.unproved_verdicts[0].reasons[0]
    )
    facts = found[0]["facts"] | {"jax": "9.9", "device": "TPU v9"}
    newer = rewritten(tmp_path / "log", [found[0] | {"facts": facts}, *found[1:]])
    proof = prove(newer)
    assert proof.exit_code == 2 and {v.reasons[0] for v in proof.unproved_verdicts} == {
        "made with other device, jax"
    }
    proof = prove(newer, anyway=True)
    assert proof.exit_code == 0 and len(proof.proved_verdicts) == 3, "equal bits are equal"
    outside = [found[0] | {"outside_contract": ["reproducible is False"]}, *found[1:]]
    proof = prove(rewritten(tmp_path / "log", outside))
    assert proof.exit_code == 2 and proof.unproved_verdicts[0].reasons == ["reproducible is False"]
    assert len(prove(served[0], sample=2).verdicts) == 2


def test_a_line_cut_off_by_a_kill_is_reported(served, prove, tiny, tmp_path):
    log = tmp_path / "log"
    whole = served[0].read_bytes().splitlines(keepends=True)[:4]
    log.write_bytes(b"".join(whole)[:-25])
    proof = prove(log)
    assert proof.claims.cut_off == [4] and len(proof.proved_verdicts) == 2 and proof.exit_code == 0
    assert "line 4 was cut off" in "\n".join(proof.format_lines())
    with LLM.from_params(tiny.config, tiny.params, audit_log=str(log), **SIZES) as llm:
        with pytest.raises(ValueError, match="another process"):
            ChainWriter(log)
        llm.generate([5, 6, 7], GREEDY, use_tqdm=False)
    proof = prove(log)
    assert proof.claims.cut_off == [4] and not proof.claims.broken
    assert len(proof.claims.starts) == 2 and len(proof.proved_verdicts) == 3 and proof.exit_code == 0
    text = tmp_path / "notes"
    shutil.copy(__file__, text)
    with pytest.raises(ValueError, match="is a file of something else"):
        ChainWriter(text)
    assert text.read_bytes() == Path(__file__).read_bytes()


def test_exceptions_of_the_contract_are_listed(llm, tiny):
    guesses = {"method": "ngram", "num_speculative_tokens": 3}
    reasons = [
        contract_exceptions(llm.engine, EngineOptions(**options))
        for options in ({}, {"reproducible": False}, {"speculative_config": guesses})
    ]
    assert reasons == [[], ["reproducible is False"], []]
    rejection = EngineOptions(speculative_config=guesses | {"acceptance": "rejection"})
    assert "by rejection" in contract_exceptions(llm.engine, rejection)[0]
    changed = replace(tiny.params, embed=tiny.params.embed.at[1, 1].add(1))
    assert hash_weights(tiny.params) == hash_weights(llm.engine.params) != hash_weights(changed)


def test_a_log_is_its_users_alone(tmp_path, caplog):
    before = os.umask(0)
    try:
        ChainWriter(tmp_path / "log").close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600 and not caplog.text
    (tmp_path / "log").chmod(0o644)
    ChainWriter(tmp_path / "log").close()
    assert "others may read it (mode 0644), and prompts are in it: chmod 600" in caplog.text


def test_a_log_renamed_while_it_opens_is_checked(tmp_path, caplog, monkeypatch):
    class Renamed(AppendLog):
        def __init__(self, path: Path):
            super().__init__(path)
            path.rename(tmp_path / "moved")

    monkeypatch.setattr(chain, "AppendLog", Renamed)
    (tmp_path / "log").touch(0o644)
    (tmp_path / "log").chmod(0o644)
    ChainWriter(tmp_path / "log").close()
    assert "others may read it (mode 0644)" in caplog.text


def test_a_log_that_has_ended_keeps_nothing_in_memory(tmp_path, caplog):
    class Full(ChainWriter):
        def append(self, record: Any) -> str:
            raise OSError(28, "No space left on device")

    log = AuditLog(Full(tmp_path / "log"))
    for _ in range(100):
        log.on_start(dict)
    log.close()
    assert log._record_makers.empty() and "No space left on device" in caplog.text
