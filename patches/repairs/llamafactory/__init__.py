"""LLaMA-Factory: gradient checkpointing with a function of its own."""
