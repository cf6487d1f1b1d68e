"""Prefill and decode apart: an engine computes prompts for others, which fetch their pages by name."""
