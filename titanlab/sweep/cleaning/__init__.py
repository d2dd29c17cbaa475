"""What can be removed from a folder of runs, and from titanlab's caches; results are never touched."""
