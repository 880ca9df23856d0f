"""What reads a layer: each yields what it found beside what the weight that was set demands."""

from . import read_copies, read_files, read_forward, read_training
from .reading import READERS, Reader

__all__ = ["READERS", "Reader", "read_copies", "read_files", "read_forward", "read_training"]
