"""Embeddings besides those of tokens: of each layer, and of an encoder in the place of tokens."""
