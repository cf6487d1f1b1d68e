"""What `duetto plan --workload` answers: which knobs and layout bear a workload within limits on devices that
need not be here, how many of them, and what they cost."""
