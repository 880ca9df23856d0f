"""What ``from_pretrained`` reads and decides: files, names, which layers are quantized."""
