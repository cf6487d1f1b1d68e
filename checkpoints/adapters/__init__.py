"""Folders of LoRA adapters, as PEFT writes them."""
