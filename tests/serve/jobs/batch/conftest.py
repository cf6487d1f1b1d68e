"""What tests of batches share."""

import pytest
from fakes.batch import runner


@pytest.fixture
def run(tmp_path):
    return runner(tmp_path)
