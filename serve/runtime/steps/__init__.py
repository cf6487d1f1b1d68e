"""Pure functions of a step, which are traced: prefill, decode, verification."""
