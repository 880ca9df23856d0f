"""What users call beside the repairs."""
