"""The suite's own tables agree with its tests."""

import pytest
from suite.groups import UNMATCHED


def test_each_row_of_repetitions_matches_a_test(request: pytest.FixtureRequest):
    if any("::" in argument for argument in request.config.args):
        pytest.skip("single tests were asked for")
    assert request.config.stash[UNMATCHED] == []
