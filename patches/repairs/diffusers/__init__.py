"""Defects of diffusers, one a file."""
