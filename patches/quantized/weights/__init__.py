"""Quantized weights of either precision: what they stand for, how they are copied, cast and kept for backward."""
