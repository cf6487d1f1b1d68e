"""Per-layer inputs: numbers of each token that enter every layer besides the residual stream."""
