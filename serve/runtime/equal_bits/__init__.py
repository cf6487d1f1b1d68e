"""Comparison of the bits that compiled shapes give, while the engine warms up."""
