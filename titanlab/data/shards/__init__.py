"""Token shards: their index, writing them, and reading sequences of a split."""
