"""launch=local: jobs of this host."""
