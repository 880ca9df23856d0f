"""What reproducers share: models on disk, counting graphs."""
