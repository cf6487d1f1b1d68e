"""Plans without running: memory, roofline, and simulated workloads on devices that need not be here."""
