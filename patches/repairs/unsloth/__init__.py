"""unsloth: LoRA kernels with a 4-bit dequantization of their own."""
