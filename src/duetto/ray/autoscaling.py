"""Autoscaling by tokens in flight. Serve pickles this module by value."""

import math
from typing import Any

LOAD = "load"  # tokens in flight of a replica, as a share of the target


def desired_replicas(context: Any) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas at which each has the target of tokens in flight, within Serve's limits.

    Requests that wait in Serve count as much as an average request in a replica.
    """
    load = sum((context.aggregated_metrics or {}).get(LOAD, {}).values())
    running = context.total_num_requests - (context.total_queued_requests or 0.0)
    if running > 0:
        load *= context.total_num_requests / running
    minimum, maximum = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return min(max(math.ceil(load), minimum), maximum), {}


# Former name, until 0.3: generated configurations of Ray Serve have it.
by_tokens_in_flight = desired_replicas
