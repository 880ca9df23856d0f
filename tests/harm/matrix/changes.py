"""What users change about a layer, through every door that they have, and what the weight is then.

A change that gives other numbers writes the same to ``s.weight``, in plain torch.
"""

from . import change_scales, change_state_dict, change_statistics, change_weight, change_whole, change_doors
from .doors import CHANGES, Change

__all__ = [
    "CHANGES",
    "Change",
    "change_doors",
    "change_scales",
    "change_state_dict",
    "change_statistics",
    "change_weight",
    "change_whole",
]
