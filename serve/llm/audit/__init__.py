"""The audit log: each answer, and all that its bits depend on."""
