"""One GPU session: what the trainer reaches on this GPU, in pieces that go on where they stopped. See __main__.py."""
