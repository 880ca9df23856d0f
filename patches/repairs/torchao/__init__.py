"""Repairs of torchao, one defect a file."""
