"""index.json of a checkpoint: its content, its reader, and the arithmetic that checks it."""
