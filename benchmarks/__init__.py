"""Measurements of duetto beside its peers: `python -m benchmarks --help`, from the root of a clone."""
