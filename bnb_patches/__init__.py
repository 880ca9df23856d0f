"""bnb-patches under a name that nobody else has; :mod:`patches` is the same package under a shorter one.

The entry points import this name only, so a program that has a ``patches`` of its own keeps it. The files lie in the
folder ``patches``. Every module is loaded once, as ``bnb_patches.*``, whichever name it was asked for by.
"""

from __future__ import annotations

import os as _os
from typing import TYPE_CHECKING

__path__ = [_os.path.join(_os.path.dirname(_os.path.dirname(_os.path.abspath(__file__))), "patches")]

if TYPE_CHECKING:
    from patches import *  # noqa: F403
    from patches import REGISTRY as REGISTRY
    from patches import __all__ as __all__
else:
    from .api import *  # noqa: F403
    from .api import REGISTRY, __all__, __doc__  # noqa: F401
