"""Checkpoints with weights in eight or four bits: their configuration, and readers of their codes."""
