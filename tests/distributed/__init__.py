"""Quantized models on several ranks against one process: products of tables (cells.py), many cells in a launch.

``python -m tests.distributed`` runs all of it, without the plugin and with it; ``test_distributed.py`` runs a slice. A rank
joins a new process group for each cell, and says how it went by the store: where one rank raises, the others see their
connection closed, and a cell where only some ranks raise is told from one where all do.
"""
