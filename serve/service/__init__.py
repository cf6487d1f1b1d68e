"""What all requests of a server share: its engine in a thread, streams, limits, and the way to the end."""
