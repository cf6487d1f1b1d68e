"""The Python API: `LLM`, sessions that share an engine between callers, intake of requests."""
