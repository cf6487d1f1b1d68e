"""The parameters of a running engine: put in place, replaced, put to sleep."""
