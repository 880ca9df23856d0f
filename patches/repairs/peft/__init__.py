"""peft: adapters on quantized layers."""
