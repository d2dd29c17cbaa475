"""Checks of a machine before anything is trained on it: software, devices, Slurm, storage, limits."""
