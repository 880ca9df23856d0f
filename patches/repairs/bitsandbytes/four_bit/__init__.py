"""NF4 and FP4: ``Linear4bit``, ``Params4bit`` and their quantization state."""
