"""Documents: reading them from files and datasets, and choosing those that validate."""
