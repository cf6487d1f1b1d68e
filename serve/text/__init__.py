"""Tokens and text; nothing here imports jax."""
