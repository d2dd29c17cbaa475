"""Techniques, a folder for each config group: a contract and, per family, a torch-free file and one that computes."""
