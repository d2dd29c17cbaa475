"""A small object store for tests: a server, and the file system by which fsspec reaches it."""
