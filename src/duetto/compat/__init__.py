"""Classes and modules that scripts for vLLM import; the library itself needs none of them."""
