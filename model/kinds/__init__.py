"""What the parts of a layer may be: sizes and kinds of mixers and norms, frozen and hashable."""
