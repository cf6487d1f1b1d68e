"""Multi-process serving: one model over the devices of several processes."""
