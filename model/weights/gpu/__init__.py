"""Weights as NVIDIA GPUs multiply them."""
