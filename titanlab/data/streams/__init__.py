"""Streams of batches: orders, packing, positions that can be kept and resumed."""
