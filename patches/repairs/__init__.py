"""What is repaired: one folder a package, one defect a file."""
