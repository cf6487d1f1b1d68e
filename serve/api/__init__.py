"""The Python API: what callers ask becomes requests, and requests become results; many callers share one
engine."""
