"""Rows of repetitions of several devices, which a run of their own collects."""

from test_suite import test_each_row_of_repetitions_matches_a_test  # noqa: F401
