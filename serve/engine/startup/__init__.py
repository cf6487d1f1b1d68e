"""From a name, a folder or parameters at hand to a warm engine."""
