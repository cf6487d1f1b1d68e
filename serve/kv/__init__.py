"""KV cache beyond one pool: offload, disaggregated prefill, cache events, prefix routing."""
