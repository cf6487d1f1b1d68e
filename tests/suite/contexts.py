"""A pytest plugin: under coverage, each line knows the tests that run it, those in started processes too."""

import os
import sys
from collections.abc import Iterator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if "coverage" in sys.modules:
        switch_context(item.nodeid.partition("@")[0])  # xdist's group stands behind
    return (yield)


def switch_context(test: str) -> None:
    """Attribute lines to a test from here on, in this process and in those that it starts."""
    import coverage

    if (measuring := coverage.Coverage.current()) is not None:
        measuring.switch_context(test)
        measuring.config.context = test  # that of a process from its start
        os.environ["COVERAGE_PROCESS_CONFIG"] = measuring.config.serialize()
        measuring.config.context = None
