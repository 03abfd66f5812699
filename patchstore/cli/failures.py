"""How the command line reports a failure: one line, and an exit code."""

import re
from contextlib import suppress
from typing import Any

import typer

from patchstore.cli import output
from patchstore.errors import (
    DataError,
    NotFound,
    PatchstoreError,
    ServerUnavailable,
    StoreUnavailable,
    UsageError,
    VersionConflict,
    WaitTimeout,
    WrongParent,
)

EXIT_CODES: dict[type[PatchstoreError], int] = {
    UsageError: 2,
    NotFound: 2,
    DataError: 3,
    WrongParent: 3,
    StoreUnavailable: 4,
    ServerUnavailable: 4,
    VersionConflict: 5,
    WaitTimeout: 6,
}


def exit_code(error: PatchstoreError) -> int:
    """Return the exit code of a command that ended with an error."""
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)


WRONG_CALL = typer.BadParameter.__mro__[1]
"""The base class of typer's errors about a wrong call; typer does not export it."""

_HINTS = {
    "--version": "the version is an argument without a name: patchstore replay STORE OUT 12",
    "-v": "the version is an argument without a name: patchstore replay STORE OUT 12",
    "--verbose": "it comes before the command: patchstore --verbose doctor STORE",
}


def explain_call(exc: Any, *, as_json: bool) -> None:
    """Report a wrong call, for which typer raised `exc`."""
    message = exc.format_message()
    if not message:
        # There were no arguments, and the help was shown instead.
        return
    # Releases of typer and click write it differently.
    if given := re.match(r"No such option:? '?(-[^\s']*[^\s'.])", message):
        is_number = given[1][1:].isdecimal()
        hint = "versions count from 0" if is_number else _HINTS.get(given[1])
        message = message if hint is None else f"No such option: {given[1]}; {hint}"
    if exc.ctx is not None:
        # On one line, also if typer wrapped it for a narrow terminal.
        usage = " ".join(exc.ctx.get_usage().split())
        message = f"{message.rstrip('.')}. {usage}; --help says more"
    explain(UsageError.kind, message, as_json=as_json)


def explain(kind: str, message: str, *, as_json: bool) -> None:
    """Report an error on standard error, and with `--json` on standard output too."""
    if as_json:
        # Standard output itself may be what failed.
        with suppress(OSError):
            output.print_json({"error": {"kind": kind, "message": message}})
    output.print_error(kind, message)
