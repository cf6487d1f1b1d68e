"""Serving over HTTP: routes of OpenAI's API, streams, and a router in front of several servers."""
