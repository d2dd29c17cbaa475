"""Restores what a run was made with: its code in a git worktree, its config, and how its environment differs from now.

Nothing of the run's folder is executed: git runs without hooks, files are parsed as data, and paths are checked.
"""
