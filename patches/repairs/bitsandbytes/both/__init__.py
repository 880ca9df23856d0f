"""What 4-bit and INT8 layers have in common."""
