"""LoRA adapters by name, their slots on the device, and their loading."""
