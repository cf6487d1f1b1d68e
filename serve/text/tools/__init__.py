"""Tool calls: parsed from text as it comes, and the grammars that ask for them."""
