"""What the patches of INT8 layers share: packed weights, row scales, and where they go."""
