"""Checkpoints whose weights are stored in eight or four bits: what they say, and how their codes are read."""
