"""Continuous batching: scheduler, requests, steps in flight and their results."""
