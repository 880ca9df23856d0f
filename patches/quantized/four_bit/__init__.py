"""What the patches of 4-bit layers share: packed weights and their quantization state."""
