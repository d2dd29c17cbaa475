"""Verbs that compare the runs of a sweep and show its results."""
