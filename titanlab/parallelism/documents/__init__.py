"""Attention within the documents of sequences that context-parallel ranks share."""
