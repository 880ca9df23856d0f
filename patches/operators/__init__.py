"""Operators that stand for a piece of eager code inside a compiled graph."""
