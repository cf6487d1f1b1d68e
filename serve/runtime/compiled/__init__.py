"""The closed table of compiled steps: shapes, sizes, and programs that are stored for later starts."""
