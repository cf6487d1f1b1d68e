"""Disaggregated prefill: an engine computes prompts for others, which fetch pages by hash."""
