"""Bodies of OpenAI's API and replies to them, for batches and the server."""
