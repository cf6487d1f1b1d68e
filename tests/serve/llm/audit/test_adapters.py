"""Requests with adapters are proved with adapters whose terms are equal, whatever their names are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases.adapters import write
from cases.invariance import BASE
from cases.requests import GREEDY, PROMPTS, SEEDED

from duetto import LLM
from duetto.lora.request import LoRARequest
from duetto.serve.jobs.verify.claims import Claims
from duetto.serve.jobs.verify.replay import LogVerifier
from duetto.serve.options.lora import parse_lora_modules

LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory) -> tuple[Path, Callable[..., LLM]]:
    """A log of requests with two adapters and of the model alone, and what makes an engine with others."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("abc"):
        write(folder / name, tiny.config, 4, seed)

    def engine(*modules: str, **more: Any) -> LLM:
        own = [f"{text}={folder / text[-1]}" for text in modules]
        return LLM.from_params(tiny.config, tiny.params, **BASE, **LORA, lora_modules=own, **more)

    with engine("a", "b", audit_log=str(folder / "log")) as llm:
        asked: list[LoRARequest | None] = [*parse_lora_modules([f"{n}={folder / n}" for n in "ab"]), None]
        params = [GREEDY, SEEDED, SEEDED]
        llm.generate(list(PROMPTS[:3]), params, use_tqdm=False, lora_request=asked)
    return folder / "log", engine


def test_what_adapters_made_is_proved(made):
    log, engine = made
    with engine("other-b", "x-c") as llm:  # b under another name, a not at all
        verdicts = {v.line: v for v in LogVerifier(llm).verify_claims(Claims.from_log(log)).verdicts}
    said = [v.reasons for _, v in sorted(verdicts.items())]
    assert not any(v.differences for v in verdicts.values())
    (lacking,) = [reasons for reasons in said if reasons]
    assert "adapter 'a'" in lacking[0] and "--lora-modules" in lacking[0]


def test_another_adapter_in_the_log_is_found(made, tmp_path):
    log, engine = made
    text = log.read_text()
    names = {
        claim.entry.adapter.name: claim.entry.adapter.digest
        for claim in Claims.from_log(log).requests
        if claim.entry.adapter
    }
    forged = tmp_path / "log"
    forged.write_text(text.replace(names["a"], names["b"]))
    with engine("a", "b") as llm:
        proof = LogVerifier(llm).verify_claims(Claims.from_log(forged))
    assert [v.differences for v in proof.verdicts].count([]) == 2 and proof.claims.broken
