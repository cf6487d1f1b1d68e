"""Pipeline parallelism: a step in stages, and a thread that dispatches each."""
