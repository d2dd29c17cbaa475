"""Verbs that show the results of a sweep to others."""
