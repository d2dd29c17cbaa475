"""The verbs that train reduced recipes on this host."""
