"""Models as Hugging Face keeps them: folders, tokenizers, the hub."""
