"""JSON Schemas of clients: what they allow, and forms of them that grammars keep."""
