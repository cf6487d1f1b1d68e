"""Requests made of /openapi.json: whatever it allows is answered as it says."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from ..conftest import LIMIT, Running, start

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
pytestmark = pytest.mark.extras

EXAMPLES = 60  # of each path, with what is allowed and with what is not
CHECKS = [
    schemathesis.checks.not_a_server_error, schemathesis.checks.status_code_conformance,
    schemathesis.checks.content_type_conformance, schemathesis.checks.response_schema_conformance,
]  # fmt: skip


@pytest.fixture(scope="module")
def short() -> Iterator[Running]:
    """A server of short requests."""
    running = start("--max-model-len", "64", "--max-queued", "8")
    yield running
    assert running.stop() == 0, running.said
    assert not any("Traceback" in line for line in running.said), running.said


def test_answers_are_those_of_the_document(short):
    schema = schemathesis.openapi.from_url(f"{short.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 10
    for operation in operations:
        statuses = answered(operation, schemathesis.GenerationMode.POSITIVE)
        if operation.method == "post":
            statuses |= answered(operation, schemathesis.GenerationMode.NEGATIVE)
            assert statuses >= {200, 400}, operation.label  # both have been seen


def answered(operation: Any, mode: Any) -> set[int]:
    """How requests that follow the document, or do not, are answered: the same in every run, without the
    search for the smallest that fails."""
    statuses: set[int] = set()

    @settings(
        max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode))
    def answers(case: Any) -> None:
        reply = case.call(timeout=LIMIT)
        case.validate_response(reply, checks=CHECKS)
        statuses.add(reply.status_code)

    answers()
    return statuses
