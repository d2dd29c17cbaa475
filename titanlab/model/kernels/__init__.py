"""Kernels that do not come from torch alone."""
