"""Conversion of weights to fewer bits or numbers, and what prepares them for it."""
