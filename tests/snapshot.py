"""What a process that tests the contract of all patches begins with: how to see each change, by identity."""

from __future__ import annotations

SNAPSHOT = """
import gc, importlib, sys
import patches
from patches import REGISTRY
from patches.engine import gate
from patches.engine.edits import module_of
from patches.engine.report import Status
from patches.engine.slots import slots_of

here = [p for p in REGISTRY.patches.values() if REGISTRY.is_for(p)]
targets = sorted({module_of(e) for p in here for e in REGISTRY.edits(p)})

def load():
    for name in targets:
        importlib.import_module(name)
    gc.collect(), gc.freeze()  # else each verb walks over all of it

def snapshot(only=()):
    '''Raw ``__dict__`` entries and code objects, by identity, of the modules ``only``, or all of every target package.'''
    keep, taken = [], {}
    packages = {t.partition(".")[0] for t in targets} - {"torch"}  # 2000 modules, some of which answer to any name
    for name, module in sorted(sys.modules.items()):
        wanted = name in only if only else name.partition(".")[0] in packages or name in targets
        if module is None or not wanted:
            continue
        pending = [(name, module)]
        while pending:
            path, owner = pending.pop()
            for key, value in list(vars(owner).items()):
                if key in ("__builtins__", "__abstractmethods__", "_abc_impl", "__warningregistry__"):
                    continue
                keep.append(value)
                taken[f"{path}.{key}"] = id(value)
                inner = getattr(value, "__func__", value)
                mark = f"{path}.{key}()"
                while hasattr(inner, "__code__"):  # and of what it is wrapped around
                    keep.append(inner.__code__)
                    taken[mark] = id(inner.__code__)
                    mark, inner = mark + "()", getattr(inner, "__wrapped__", None)
                if isinstance(value, type) and value.__module__ == name and path.count(".") < 8:
                    pending.append((f"{path}.{key}", value))
    return taken, keep

def changed(a, b):
    return sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))
"""
