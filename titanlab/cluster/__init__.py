"""Facts about the machines that runs use."""
