"""Attention within the documents of packed sequences."""
