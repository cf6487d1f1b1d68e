"""Weights as duetto's own CPU kernels read them."""
