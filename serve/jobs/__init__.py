"""Work that is not served: batch jobs, worker processes, verification of audit logs."""
