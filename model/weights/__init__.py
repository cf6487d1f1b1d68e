"""Records that stand in the tree where an array stood, and multiply in its place."""
