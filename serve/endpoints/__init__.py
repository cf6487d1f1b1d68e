"""Paths of the server: what a request asks for, and its answer."""
