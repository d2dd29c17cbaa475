"""Profilers: what a run can measure of its own steps beyond the metrics."""
