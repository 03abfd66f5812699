"""Checks of the JSON objects that clients send to vLLM's routes."""

from collections.abc import Mapping
from typing import Any

from patchstore.errors import UsageError


def keywords(what: str, given: object, types: Mapping[str, type], required: set[str]) -> Mapping[str, Any]:
    """Return keyword arguments, after checking their names and types.

    Raises:
        UsageError: with the known names, and without the values, which may be secrets.
    """
    known = ", ".join(
        f"{name!r} ({kind.__name__}{'' if name in required else ', optional'})"
        for name, kind in types.items()
    )
    if not isinstance(given, Mapping):
        raise UsageError(f"{what} must be an object with {known}, not a {type(given).__name__}")
    if unknown := given.keys() - types.keys():
        raise UsageError(f"{what} has unknown keys {sorted(unknown)}; known are {known}")
    if missing := required - given.keys():
        raise UsageError(f"{what} lacks {sorted(missing)}; known are {known}")
    for name, value in given.items():
        # To Python, True is a number too.
        if not isinstance(value, types[name]) or isinstance(value, bool) is not (types[name] is bool):
            raise UsageError(f"{what} has a {type(value).__name__} as {name!r}; known are {known}")
    return given
