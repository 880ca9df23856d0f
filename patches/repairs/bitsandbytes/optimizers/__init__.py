"""The optimizers of bitsandbytes: what they keep, what they override, what they step on."""
