"""A step in stages: consecutive layers on devices of their own, and a thread that dispatches each."""
