"""Speculative decoding: draft tokens from the host and from the device, and their number."""
