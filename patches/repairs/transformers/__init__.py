"""transformers: what a fine-tuning step on quantized layers meets in it."""
