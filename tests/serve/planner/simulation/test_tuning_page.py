"""docs/tuning.md is what its command makes: tables of formulas are made anew here, those of simulations are
known by the code that made them."""

import pytest

from benchmarks import tuning


@pytest.mark.parametrize("name", ["batches", "bubbles", "chunks"])
def test_tables_of_formulas_are_up_to_date(name):
    page, (head, rows) = tuning.PAGE.read_text(), tuning.CLOSED[name]
    assert tuning.filled(page, name, tuning.table(head, rows())) == page, "run `python -m benchmarks.tuning`"


def test_tables_of_simulations_are_those_of_the_code():
    assert f"the code of {tuning.stamp()}." in tuning.PAGE.read_text(), "run `python -m benchmarks.tuning`"
    assert all(f"<!-- tuning: {name} -->\n|" in tuning.PAGE.read_text() for name in tuning.SIMULATED)
