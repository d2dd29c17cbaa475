"""Checkpoints in remote stores, which fsspec reads and writes."""
