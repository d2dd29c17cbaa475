"""Access to processes, files, imports and the Hugging Face hub."""
