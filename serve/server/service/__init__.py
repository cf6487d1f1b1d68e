"""What all requests of a server share: the engine's thread, fair queueing, limits, metrics and errors."""
