"""launch=local: jobs on this host."""
