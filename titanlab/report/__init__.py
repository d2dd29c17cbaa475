"""Sweeps as data frames and figures; for notebooks, and whoever writes Python."""
