"""Collectives in symmetric memory: buffers of GPUs that other GPUs read and write."""
