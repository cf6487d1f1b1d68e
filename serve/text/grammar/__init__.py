"""Structured outputs: grammars over a vocabulary, compiled by llguidance."""
