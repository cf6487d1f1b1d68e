"""Adapters (LoRA) of the model that is served: by name, in their places on the device, and on their way
there."""
