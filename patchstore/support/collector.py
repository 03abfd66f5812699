"""The garbage collector, kept away from work that makes many objects and no cycles.

A full collection walks all objects of the process. Where tens of thousands of tensors are described by a few
objects each, several are due on the way, and take longer than the work.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Do what the block says without collections. What it made for itself should be gone at its end."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
