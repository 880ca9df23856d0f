"""Repairs of torch, where it meets quantized layers."""
