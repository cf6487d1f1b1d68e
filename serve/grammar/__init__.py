"""Grammars over a model's vocabulary, compiled by llguidance, and how far each request is in its own."""
