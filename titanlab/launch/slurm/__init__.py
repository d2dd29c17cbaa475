"""launch=slurm: jobs of a Slurm cluster."""
