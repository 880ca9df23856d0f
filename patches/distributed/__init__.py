"""State dicts and checkpoints of several ranks."""
