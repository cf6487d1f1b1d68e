"""The HTTP server process: its address, limits, authentication, CORS, tracing and shutdown."""
