"""The engine: scheduling, speculative decoding, LoRA, and its start."""
