"""Which shapes give the same bits, found while the engine warms up."""
