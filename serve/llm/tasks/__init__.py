"""What `LLM` does beside generating: beam search, embeddings, log-likelihoods, chat replies with tools."""
