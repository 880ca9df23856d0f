"""Optimizers of bitsandbytes: the bits of their states, and who overrides them."""
