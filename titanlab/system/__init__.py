"""Processes, files, imports and the hub, as this package uses them."""
