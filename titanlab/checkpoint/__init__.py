"""Saving a run's whole state, and resuming from it."""
