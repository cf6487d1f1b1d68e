"""Serving on a mesh: the tests of `two_*.py` run in processes that have two devices."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
OTHERS = "folder or compressed or training"
LAYOUTS = "served_tokens or folder"
SHARDS = "served_tokens or nothing"


# Tests by their names, and how many at least there are.
@pytest.mark.parametrize(
    "file, names, least",
    [
        ("two_devices.py", "where_they_lie", 4),
        ("two_devices.py", OTHERS, 4),
        ("two_devices.py", f"not where_they_lie and not ({OTHERS})", 8),
        ("two_layouts.py", LAYOUTS, 4),
        ("two_layouts.py", f"not ({LAYOUTS})", 17),
        ("two_families.py", "give_the_tokens", 25),
        ("two_shards.py", SHARDS, 4),
        ("two_shards.py", f"not ({SHARDS})", 12),
    ],
)
def test_two_devices_give_the_tokens_of_one(file: str, names: str, least: int):
    """At most two: with more devices than cores, collectives that overlap can hang on a CPU."""
    flags = {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
    }
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", names]
    command = [sys.executable, "-m", "pytest", *options, str(TESTS / file)]
    done = subprocess.run(
        command, env=os.environ | flags, cwd=TESTS.parents[2], capture_output=True, text=True,
        timeout=1740, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= least and "skipped" not in done.stdout
