"""What an engine counts and times."""
