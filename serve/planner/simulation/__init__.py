"""The real engine on a simulated device: latency and throughput of a workload before anything runs."""
