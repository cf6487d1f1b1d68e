"""What a machine of the fleet stands on, in simulated time: event loop, network, disk and device."""
