"""A log of what was answered, and of all that the answers' bits follow from."""
