"""YAMLs of config groups."""
