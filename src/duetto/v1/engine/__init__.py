"""Modules under the names that they have in vLLM."""
