"""Arguments and options that several commands have."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from patchstore.errors import UsageError

StoreUrl = Annotated[
    str, typer.Argument(metavar="STORE", help="A folder, s3://bucket/prefix or another URL.")
]
Version = Annotated[
    str | None, typer.Argument(metavar="VERSION", help="A number or a tag; the newest by default.")
]
StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="KEY=VALUE",
        help="Storage option, such as endpoint_url=...; values may be JSON; repeatable.",
    ),
]
RequireSignature = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="PUBKEY",
        help="A public key in PEM. Refuse versions that it has not signed; repeatable: one of them suffices.",
    ),
]
AllowRollback = Annotated[
    bool,
    typer.Option(
        "--allow-rollback",
        help="Where signatures are required, accept an older version than was served before.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output, one object per line.")]

_CREDENTIALS = {"key", "secret", "token", "gateway_key", "gateway_secret", "username", "password"}
"""Always text, even if a value looks like a number: 12345e67."""


def parsed(options: list[str] | None) -> dict[str, Any]:
    """Read storage options as they are given on the command line."""
    found: dict[str, Any] = {}
    for option in options or []:
        key, separator, value = option.partition("=")
        if not separator or not key:
            raise typer.BadParameter(f"--option takes KEY=VALUE, not {option!r}")
        found[key] = value if key in _CREDENTIALS else _option_value(value)
    return found


def _option_value(text: str) -> Any:
    """Return a JSON number, truth value, list or object as such, and anything else as text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if isinstance(value, str) else value


def check_out(out: str) -> None:
    """Refuse an OUT that is a number: the caller probably gave a version and left out OUT."""
    if out.isdecimal():
        raise UsageError(f"{out} is no place to write to; give OUT before the version, or ./{out}")
