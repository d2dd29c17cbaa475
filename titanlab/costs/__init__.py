"""Torch-free arithmetic: layouts, FLOPs, communication, memory, hardware."""
