"""Tokenizers: loading, training and downloading them, and encoding in a process that can be ended."""
