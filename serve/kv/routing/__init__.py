"""Placement of prompts: which replica has which pages cached, and which one is next."""
