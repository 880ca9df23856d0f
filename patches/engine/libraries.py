"""Where the code of the installed packages is read: in this process, or for a forecast in their files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

from . import imports


class Libraries:
    """The packages as this process has imported them. :class:`.library_files.LibraryFiles` has them as their files say."""

    def module(self, name: str) -> ModuleType | None:
        """Return the module ``name``; None if it is not there."""
        return sys.modules.get(name)

    def is_imported(self, name: str) -> bool:
        """Tell whether the import of module ``name`` and of its package are over."""
        return imports.imported(name)

    def after_import(self, name: str, callback: Callable[[], None]) -> None:
        """Call ``callback`` once module ``name`` is imported; at once if it is."""
        imports.after_import(name, callback)

    def version(self, module: str) -> str | None:
        """Return the ``__version__`` of a top-level module; None if it is not imported whole, or has none."""
        if not imports.imported(module):
            return None  # half way through its import a module may not have set it yet
        try:
            found = sys.modules[module].__version__
        except Exception:  # a lazy module may do anything
            return None
        return found if isinstance(found, str) else None


IMPORTED = Libraries()
"""The packages of this process."""
