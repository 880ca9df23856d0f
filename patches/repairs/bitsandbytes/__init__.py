"""bitsandbytes: 4-bit and INT8 layers, their autograd functions and parameters."""
