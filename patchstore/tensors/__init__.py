"""Bits of tensors, in plain torch. Importing this raises UsageError where torch is missing or too old.

An installer does not bring torch without an extra: operators' commands do not need it.
"""

from packaging.version import Version

from patchstore.errors import UsageError

OLDEST_TORCH = "2.9"
_ADVICE = f"pip install 'torch>={OLDEST_TORCH}'"

try:
    from torch import __version__ as _found
except ModuleNotFoundError as exc:
    raise UsageError(f"this needs torch, which is not installed: {_ADVICE}") from exc
# By the numbers alone: builds of a vendor are called 2.9.0a0.
if Version(_found).release < Version(OLDEST_TORCH).release:
    raise UsageError(f"this needs torch {OLDEST_TORCH} or newer, and torch {_found} is installed: {_ADVICE}")
