"""Weights in the layouts of duetto's own CPU kernels."""
