"""Techniques by config group. A folder has a contract, and for each family a torch-free file and one that computes."""
