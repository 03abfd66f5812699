"""Checks of arguments, where Python itself would accept too much."""

import operator
import os
import re
from pathlib import Path
from typing import Any

from patchstore.errors import UsageError

_MOST_BITS = 128
_MOST_DIGITS = 20
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


def whole_number(name: str, value: Any, *, least: int, most: int = 2**63 - 1) -> int:
    """Return an argument as an int: any integer of Python, but no bool."""
    # Of numpy and torch too, neither of which is imported here: commands that only look do without.
    is_truth = isinstance(value, bool) or str(getattr(value, "dtype", None)) in {"bool", "torch.bool"}
    try:
        number = None if is_truth else operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None:
        raise UsageError(f"{name} must be an integer, not {value!r:.100} ({type(value).__name__}); use int()")
    if not least <= number <= most:
        raise UsageError(f"{name} must be from {least} to {most}, not {_shown(number)}")
    return number


def _shown(number: int) -> str:
    """Spell a number, unless it is so large that Python would refuse to."""
    return str(number) if number.bit_length() <= _MOST_BITS else f"one of {number.bit_length():,} bits"


def version_number(version: Any) -> int:
    """Return a version's number."""
    if isinstance(version, int) and version < 0:
        raise UsageError(f"versions count from 0: {_shown(version)} is none, and not the newest")
    return whole_number("version", version, least=0)


def number_in(text: str) -> int | None:
    """Return the number that a text has in digits; None if it is none.

    Of one that is too large for anything here only the first digits count: Python reads no thousands of them.
    """
    if not (text.isascii() and text.isdecimal()):
        return None
    return int(text.lstrip("0")[:_MOST_DIGITS] or "0")


def local_path(name: str, value: Any) -> Path:
    """Return the path of a file or folder of this machine, with a user's folder in place of `~`."""
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise UsageError(f"{name} must be a path, not {value!r:.100} ({type(value).__name__})")
    text = os.fspath(value)
    if not text or _URL.match(text):
        raise UsageError(
            f"{name} must be a path on this machine, not {text!r}; a path that looks so begins with ./"
        )
    try:
        return Path(text).expanduser()
    except RuntimeError as exc:
        raise UsageError(f"{name}={text!r}: {exc}") from exc
