"""What a program must cost, and what it does cost: floors, XLA's modules, and devices that are not there."""
