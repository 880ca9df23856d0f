"""Quantized experts of a mixture: one parameter that looks like floating point and holds packed weights."""
