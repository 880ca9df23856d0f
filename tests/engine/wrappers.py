"""Wrapping functions of the toy with wrapt, as OpenTelemetry, Datadog and MLflow wrap those of the libraries that we patch."""

from __future__ import annotations

from patches.engine.edits import Edit


class Counter:
    """A wrapper that counts the calls through it, and notes the instance of each."""

    def __init__(self):
        self.instances = []

    def __call__(self, wrapped, instance, args, kwargs):
        self.instances.append(instance)
        return wrapped(*args, **kwargs)

    @property
    def calls(self) -> int:
        return len(self.instances)


def wrap(toy, edit: Edit, counter: Counter):
    import wrapt

    return wrapt.wrap_function_wrapper(toy, edit.target.partition(":")[2], counter)


def unwrap(toy, edit: Edit, wrapper) -> None:
    owner, name = holder(toy, edit)
    assert vars(owner)[name] is wrapper, "it stands where wrapt put it"
    setattr(owner, name, wrapper.__wrapped__)


def holder(toy, edit):
    *outer, name = edit.target.partition(":")[2].split(".")
    for each in outer:
        toy = getattr(toy, each)
    return toy, name
