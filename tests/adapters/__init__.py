"""Each option of each adapter of peft on quantized layers, beside the same option on ``nn.Linear``.

What ``nn.Linear`` with the dequantized weight gets is the judge: the names, shapes and dtypes of what is trained, the
outputs before and after a step, the gradients, what is saved and loaded, what is merged. The options are found by walking the
configuration classes of the installed peft. ``python -m tests.adapters`` runs the product.
"""
