"""Two threads import at once: one a package, the other a module of it that an import hook waits for.

``python tests/programs/wrapt_imports.py wrapt`` uses the hook of wrapt, ``... patches`` ours. The events make sure that
the second thread asks for the module while the first is in the middle of the package. A program without them meets this
by chance.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from pathlib import Path

begun, searched = threading.Event(), threading.Event()
told: list[str] = []


class Searched:
    """A finder that finds nothing, and says that the second thread has come to its search."""

    def find_spec(self, name, path=None, target=None):
        if name == "package.part":
            searched.set()


def write_package(folder: str) -> None:
    package = Path(folder) / "package"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import __main__\n__main__.begun.set()\n__main__.searched.wait()\nimport json.tool\n"
    )
    (package / "part.py").write_text("")
    sys.path.insert(0, folder)


def set_hook(whose: str) -> None:
    if whose == "wrapt":
        import wrapt

        wrapt.register_post_import_hook(lambda module: told.append(module.__name__), "package.part")
    else:
        from patches.engine import imports

        imports.after_import("package.part", lambda: told.append("package.part"))
    sys.meta_path.insert(0, Searched())


def main(whose: str, seconds: float = 5) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_package(folder)
        set_hook(whose)
        threads = [
            threading.Thread(target=__import__, args=(name,), daemon=True) for name in ("package", "package.part")
        ]
        threads[0].start()
        begun.wait()
        threads[1].start()
        for thread in threads:
            thread.join(seconds / 2)
        waiting = sum(thread.is_alive() for thread in threads)
        print(f"{whose}: {waiting} of 2 threads still wait, hook called {len(told)} times", flush=True)
    os._exit(0)  # threads that wait for ever would keep the process


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:]))
