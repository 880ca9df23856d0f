"""What the patches of INT8 layers share: codes, row scales, and where they go."""
