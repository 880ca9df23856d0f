"""Every architecture of transformers' mappings that can be built tiny: quantized, run, trained, saved and loaded.

``python -m tests.architectures`` runs all of them, without the plugin and with it, and keeps what they did in
``docs/architectures.json``, which the table of ``docs/architectures.md`` is made from.
"""
