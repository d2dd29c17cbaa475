"""Verbs that look after runs and machines: logs, clean, repro, doctor."""
