"""The closed table of compiled steps: shapes, sizes, and programs kept between starts."""
