"""Adapters of peft on quantized layers: merging, taking them out, gradients of the inputs."""
