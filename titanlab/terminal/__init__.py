"""Output on a terminal: text, tables, numbers, progress."""
