"""Saving a run's whole state, and taking it up again."""
