"""Engines that tests of the Python API share, a module each."""

from collections.abc import Iterator

import pytest
from cases.requests import PARAMS, PROMPTS, SIZES, exact

from duetto import LLM


@pytest.fixture(scope="module")
def start(tiny):
    return lambda **options: LLM.from_params(tiny.config, tiny.params, **(SIZES | options))


@pytest.fixture(scope="module")
def llm(start) -> Iterator[LLM]:
    with start() as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm) -> list[tuple]:
    return exact(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.fixture
def nothing_is_left(llm):
    """Every test gives all pages back and leaves no request behind."""
    yield
    assert (
        not llm.has_unfinished_requests()
        and not llm.session.subscriptions
        and not llm.engine.scheduler.has_work
    )
    assert llm.engine.tables.occupancy == 0
