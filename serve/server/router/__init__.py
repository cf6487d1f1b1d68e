"""A router in front of several servers: queue, health, proxy, failover. Imports no jax."""
