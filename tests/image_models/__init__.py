"""Every model of diffusers that can be built tiny: quantized, run, trained, saved, loaded, merged, offloaded and compiled.

``python -m tests.image_models`` runs all of them, without the plugin and with it, and keeps what they did in
``docs/image_models.json``, which the table of ``docs/image_models.md`` is made from.
"""

STEPS = ("loaded", "forward", "LoRA gradients", "checkpointing", "saved", "loaded again", "dequantized", "fused", "unfused",
         "offloaded", "graphs", "in bfloat16")  # fmt: skip
"""What is looked at, in the order of the table. The site reads this where there is no torch."""
