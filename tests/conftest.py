"""Options of the suite, and its fixtures where tests run: a process that only hands out tests imports neither
jax nor duetto."""

import os

import pytest

pytest_plugins = ["suite.costs", "suite.groups"]


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    config = pluginmanager.get_plugin("pytestconfig")
    hands_out = getattr(config.known_args_namespace, "numprocesses", None)
    if not hands_out or "PYTEST_XDIST_WORKER" in os.environ:
        pluginmanager.import_plugin("suite.fixtures")
