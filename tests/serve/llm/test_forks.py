"""A process that was forked from an LLM's: it may hold the LLM, and is refused where it would use it."""

import os
import select
import signal
from collections.abc import Callable

import pytest
from cases.requests import GREEDY, PROMPTS, exact

from duetto import LLM
from duetto.serve.runtime.multihost.group import ProcessGroup

PATIENCE = 60.0  # seconds: a child that hangs fails a test

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here"),
    pytest.mark.filterwarnings("ignore:.*fork.*"),
]


def said_in_child(work: Callable[[], object]) -> str:
    """What comes of a call in a forked child, as text: what it returns, or the error it raises."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = str(work())
        except BaseException as error:  # noqa: BLE001 - the child must not go on with the tests
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        if not select.select([pipe], [], [], PATIENCE)[0]:
            os.kill(child, signal.SIGKILL)
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


def test_an_llm_is_refused_in_a_forked_child(llm, tiny):
    expected = exact(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    begun = llm.stream(PROMPTS[0], GREEDY)
    next(begun)
    uses = [
        lambda: llm.generate(PROMPTS, GREEDY, use_tqdm=False),
        lambda: list(llm.stream(PROMPTS[0], GREEDY)),
        lambda: next(begun),
        lambda: llm.add_request(PROMPTS[0], GREEDY),
        lambda: llm.embed(PROMPTS),
        llm.step,
        llm.report,
        lambda: llm.update_params(tiny.params),
        lambda: llm.pause_generation("abort"),
        lambda: LLM.from_params(tiny.config, tiny.params),
        LLM,
    ]
    for use in uses:
        assert said_in_child(use).startswith("RuntimeError: this process was forked after jax had started")
    assert len(list(begun)) > 0
    assert exact(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected


def test_a_forked_child_may_hold_an_llm_and_end(llm):
    """As the workers of a data loader do; what ends there ends nothing in the parent."""
    begun = llm.stream(PROMPTS[0], GREEDY)
    first = next(begun)
    assert said_in_child(lambda: (llm.config.vocab_size, llm.longest_prompt)).startswith("(")
    assert said_in_child(llm.close) == said_in_child(llm.__exit__) == said_in_child(begun.close) == "None"
    rest = [token for delta in (first, *begun) for token in delta.token_ids]
    assert rest == llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_the_end_of_a_forked_child_ends_no_group():
    group = ProcessGroup(0, 1, [], 60.0)
    ends: list[str] = []
    group.shutdown = lambda: ends.append("shutdown")
    assert said_in_child(lambda: (group.end_group(), ends)) == "(None, [])"
    group.end_group()
    assert ends == ["shutdown"]
