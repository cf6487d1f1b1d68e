"""Weights in the layouts of duetto's own kernels for NVIDIA GPUs."""
