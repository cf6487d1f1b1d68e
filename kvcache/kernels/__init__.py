"""Kernels for NVIDIA GPUs, which read pages where they lie."""
