"""The audit log: each answer, and the facts that decide its bits."""
