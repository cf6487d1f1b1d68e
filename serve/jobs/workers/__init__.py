"""Engines in worker processes (Ray) behind one batch job."""
