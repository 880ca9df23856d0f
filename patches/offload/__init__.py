"""Layers whose weights accelerate keeps on the CPU or the disk."""
