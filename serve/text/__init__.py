"""Tokens and text, tools, grammars, OpenAI's bodies. No engine, no device, no HTTP."""
