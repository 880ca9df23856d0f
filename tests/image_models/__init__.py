"""Every model of diffusers that can be built tiny: quantized, run, trained, saved, loaded, merged, offloaded and compiled.

``python -m tests.image_models`` runs all of them, without the plugin and with it, and keeps what they did in
``docs/image_models.json``, which the table of ``docs/image_models.md`` is made from.
"""
