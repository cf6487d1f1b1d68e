"""Classes and modules that scripts for vLLM import. The library itself does not use them."""
