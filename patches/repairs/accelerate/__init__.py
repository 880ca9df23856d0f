"""accelerate: hooks that move weights, and what they do to quantized ones."""
