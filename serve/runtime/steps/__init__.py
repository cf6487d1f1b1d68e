"""The pure step that is traced: prefill, decode, verification."""
