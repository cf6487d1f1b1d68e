"""A job that cannot be lost: lines in, answers out, a journal between; it knows the engine by a protocol
only."""
