"""Reads checkpoints of an earlier format, which have pickles, without running code in them."""
