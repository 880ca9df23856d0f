"""4-bit and INT8 layers alike."""
