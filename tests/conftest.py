"""Options of the suite, and its fixtures where tests run: a process that only hands out tests imports neither
jax nor duetto."""

import os

import pytest

pytest_plugins = ["suite.contexts", "suite.costs", "suite.groups"]


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    given = pluginmanager.get_plugin("pytestconfig").known_args_namespace
    hands_out = getattr(given, "numprocesses", None) and not (given.collectonly or given.usepdb)
    if not hands_out or "PYTEST_XDIST_WORKER" in os.environ:
        pluginmanager.import_plugin("suite.fixtures")
