"""Sweeps as data frames and figures, for notebooks and Python programs."""
