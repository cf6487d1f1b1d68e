"""`duetto plan --workload`: the layout and knobs that serve a workload within limits, how many
devices they take, and their cost."""
