"""What a quantized weight is: packed weights, quantization state or row scales, and who owns each."""
