"""Data: text or tokens in, batches of token ids out, in an order that no layout changes. Never imports torch."""
