"""Framed and authenticated messages over TCP."""
