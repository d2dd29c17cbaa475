"""Starting the ranks of a run."""
