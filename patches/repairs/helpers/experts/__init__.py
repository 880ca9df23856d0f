"""Experts of a mixture in 4 bits: one parameter that looks like floating point and holds packed weights."""
