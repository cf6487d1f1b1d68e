"""Kinds of mixers and norms with their sizes, frozen and hashable."""
