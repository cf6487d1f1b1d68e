"""Batch jobs: JSON lines in, answers out, a journal that survives kills."""
