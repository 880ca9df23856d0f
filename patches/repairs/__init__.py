"""The patches: one folder a package, one defect a file."""
