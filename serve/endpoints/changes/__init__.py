"""Paths that change what a server serves while it runs: its weights, and adapters beside them."""
