"""Pipeline parallelism: a step in stages, each dispatched by a thread."""
