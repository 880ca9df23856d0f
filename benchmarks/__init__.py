"""What the patches change in speed and memory, and what they cost: ``python -m benchmarks``."""
