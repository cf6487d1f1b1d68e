"""The least a program must cost, and what XLA's module does cost, on a target device."""
