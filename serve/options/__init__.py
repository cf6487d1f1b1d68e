"""Every knob of an engine, with its meaning, default and limits."""
