"""Do two recipes train the same, do recipes train at all, and does a step do what its parts declare?"""
