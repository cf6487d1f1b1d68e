"""Engines in processes of their own, as one for a batch job."""
