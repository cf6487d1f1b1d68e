"""Serving on a mesh: the tests of `two_devices.py` run in processes that have two devices."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
OTHERS = "folder or compressed or training"


# Tests by their names, and how many at least there are.
@pytest.mark.parametrize(
    "names, least", [("where_they_lie", 4), (OTHERS, 4), (f"not where_they_lie and not ({OTHERS})", 8)]
)
def test_two_devices_give_the_tokens_of_one(names: str, least: int):
    """At most two: with more devices than cores, collectives that overlap can hang on a CPU."""
    flags = {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
    }
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", names]
    command = [sys.executable, "-m", "pytest", *options, str(TESTS / "two_devices.py")]
    done = subprocess.run(
        command, env=os.environ | flags, cwd=TESTS.parents[2], capture_output=True, text=True,
        timeout=1740, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= least and "skipped" not in done.stdout
