"""From a sweep's file or a command line to named recipes."""
