"""The processes of a run: world, mesh, ranks, tracing, watchdog, stop signals."""
