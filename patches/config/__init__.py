"""What a ``BitsAndBytesConfig`` asks for, and the quantizers of transformers that carry it out."""
