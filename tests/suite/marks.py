"""Marks of repetitions: tests and cases that show for another case what `make test` shows once.

They run with `--full` alone. A test that found a fault which no other test finds is no repetition.
A whole test is marked with `pytest.mark.full`.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest


def full(*values: Any) -> Any:
    """Return a case of `pytest.mark.parametrize` that is a repetition."""
    return pytest.param(*values, marks=pytest.mark.full)


def full_if(predicate: Callable[..., bool]) -> pytest.MarkDecorator:
    """Mark the cases for which a predicate of some parameters holds, each named as the test names it."""
    return pytest.mark.full_if.with_args(predicate)


def is_repetition(item: pytest.Item, params: dict[str, Any]) -> bool:
    """Whether a predicate of `full_if` holds for the parameters of a test."""
    predicates = [mark.args[0] for mark in item.iter_markers("full_if")]
    return any(holds(**{name: params[name] for name in signature(holds).parameters}) for holds in predicates)
