"""Matrix products, norms and attention for CPUs, compiled from C++ and called by XLA."""
