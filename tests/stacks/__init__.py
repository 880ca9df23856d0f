"""Whole stacks that people are pinned to: which they are (``stacks.toml``), and what the plugin does on each."""
