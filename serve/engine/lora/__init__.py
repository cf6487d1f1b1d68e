"""LoRA adapters by name, their places on the device, and their loading."""
