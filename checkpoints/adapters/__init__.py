"""Folders of adapters (LoRA) as PEFT writes them."""
