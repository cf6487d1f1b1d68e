"""State shared by all requests of a server: the engine's thread, fair queueing, limits, metrics and
errors."""
