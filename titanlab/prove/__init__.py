"""Do two recipes train the same? Proofs that start runs."""
