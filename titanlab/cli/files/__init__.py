"""Verbs that read and write files for other programs: weights, tokenizers, tokens."""
