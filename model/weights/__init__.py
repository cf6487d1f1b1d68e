"""Records that stand in the tree of parameters in place of arrays, and multiply in their place."""
