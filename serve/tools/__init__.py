"""Calls of tools: told from the rest of a text as it comes, and grammars that ask for them."""
