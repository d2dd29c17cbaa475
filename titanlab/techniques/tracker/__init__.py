"""Trackers: where metrics go besides the run's own metrics.jsonl, which is always written."""
