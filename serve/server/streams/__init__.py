"""From a parsed body to its answer, whole or as server-sent events."""
