"""A fleet in simulated time under seeded faults (FoundationDB's way: Zhou et al., SIGMOD 2021): the real
scheduler, tables, offload, router and service, over a simulated clock, network, disk and device."""
