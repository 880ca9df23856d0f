"""Programs that several reproducers begin with or measure: models on disk, graphs, steps, ranks, logs."""
