"""An audit log proved: its requests are run again, and bits compared."""
