"""Workloads, request traces, and how many requests meet their limits."""
