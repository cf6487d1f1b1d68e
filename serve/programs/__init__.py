"""The closed table of compiled steps: shapes, sizes, compiled programs and which of them give the same
bits."""
