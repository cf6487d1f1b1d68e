"""Parsed bodies, and their answers: whole or as server-sent events."""
