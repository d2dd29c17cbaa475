"""Profilers: measurements of a run's steps beyond the metrics."""
