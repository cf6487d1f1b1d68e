"""Tasks of `LLM` other than generation: beam search, embeddings, log-likelihoods, chat replies with tools."""
