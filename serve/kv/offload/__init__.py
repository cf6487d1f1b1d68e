"""KV offload to host memory and disk."""
