"""Conversations as prompts: messages, checked and in the form that a chat template reads."""
