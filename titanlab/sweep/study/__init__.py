"""From a sweep's file, or a command line, to recipes with names."""
