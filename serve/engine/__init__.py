"""Requests become steps: scheduler, steps in flight, and what came of them."""
