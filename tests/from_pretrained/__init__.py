"""Programs that ask for a model: skip lists x models x precisions x checkpoints x dtypes, judged by rules written here.

``python -m tests.from_pretrained`` runs all of them, without the plugin and with it, on whatever transformers is installed.
"""
