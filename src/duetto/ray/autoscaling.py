"""Autoscaling by tokens in flight. Serve pickles this module by value."""

import math
from typing import Any

LOAD = "load"  # tokens in flight of a replica, as a share of the target


def by_tokens_in_flight(context: Any) -> tuple[int, dict[str, Any]]:
    """Return how many replicas would each have the target of tokens in flight, within the limits of the
    deployment. Requests that wait in Serve count as much as those in replicas do on average."""
    load = sum((context.aggregated_metrics or {}).get(LOAD, {}).values())
    running = context.total_num_requests - (context.total_queued_requests or 0.0)
    if running > 0:
        load *= context.total_num_requests / running
    least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return min(max(math.ceil(load), least), most), {}
