"""Everything that runs on devices: the step, compiled programs, pipeline stages, several hosts."""
