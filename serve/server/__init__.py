"""A server of OpenAI's API over HTTP: one engine, in a thread of its own, and one event loop."""
