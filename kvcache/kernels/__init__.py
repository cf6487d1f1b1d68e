"""Attention and recurrent-state kernels that read and write pages in place, on GPUs, TPUs and CPUs."""
