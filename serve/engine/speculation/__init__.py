"""Speculative decoding: drafters on the host, guessers on the device, and their controller."""
