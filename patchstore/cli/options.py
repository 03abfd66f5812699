"""Arguments and options that several commands have; and the store, run and version that they name."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from patchstore.bucket import history, notes
from patchstore.bucket.records import Manifest
from patchstore.errors import UsageError
from patchstore.stores import Store, open_store
from patchstore.support.arguments import number_in, version_number

StoreUrl = Annotated[
    str, typer.Argument(metavar="STORE", help="A folder, s3://bucket/prefix or another URL.")
]
Version = Annotated[
    str | None, typer.Argument(metavar="VERSION", help="A number or a tag; the newest by default.")
]


def _storage_option(*names: str) -> Any:
    text = "Storage option, such as endpoint_url=...; values may be JSON; repeatable."
    return typer.Option(*names, metavar="KEY=VALUE", help=text)


StorageOption = Annotated[list[str] | None, _storage_option("--option", "-o")]
StorageOptionWithoutO = Annotated[list[str] | None, _storage_option("--option")]
"""For a command whose -o is a file."""
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
ServerHeader = Annotated[
    list[str] | None,
    typer.Option(
        metavar="'NAME: VALUE'",
        help="Send this header to each server that is named; repeatable. 'NAME: @FILE' has the value in a "
        "file, and @FILE whole headers, one a line. PATCHSTORE_SERVER_TOKEN in the environment is sent as "
        "Authorization: Bearer.",
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


def server_headers(given: list[str] | None) -> dict[str, str]:
    """Read headers as they are given on the command line. No message shows a value, or what may be one."""
    from patchstore.follow.http_client import checked_headers

    found: dict[str, str] = {}
    for text in given or []:
        lines = _secret_file(text[1:]).splitlines() if text.startswith("@") else [text]
        for line in filter(str.strip, lines):
            name, separator, value = line.partition(":")
            value = value.strip()
            if not separator:
                raise UsageError("--server-header takes 'NAME: VALUE', 'NAME: @FILE' or @FILE")
            if value.startswith("@") and line is text:
                value = _secret_file(value[1:])
            if name in found:
                raise UsageError("--server-header gives one header twice")
            found[name] = value
    return checked_headers(found)


def _secret_file(path: str) -> str:
    try:
        return Path(path).expanduser().read_text()
    except (OSError, ValueError, RuntimeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "no text in UTF-8"
        raise UsageError(f"a file that --server-header names after @ cannot be read: {reason}") from None


def check_out(out: str) -> None:
    """Refuse an OUT that is a number: the caller probably gave a version and left out OUT."""
    if out.isdecimal():
        raise UsageError(f"{out} is no place to write to; give OUT before the version, or ./{out}")


# Open stores, and read the run and the newest version.


def open_with(url: str, options: list[str] | None) -> Store:
    """Open a store with options as they are given on the command line."""
    return open_store(url, **parsed(options))


def head(store: Store) -> Manifest:
    """Read the newest version."""
    newest = history.head(store)
    if newest is None:
        raise history.no_version(store)
    return newest


def number_or_tag(version: str) -> int | str:
    """Return what a VERSION of the command line is: a number, or the name of a tag."""
    if (number := number_in(version)) is not None:
        return version_number(number)
    if not version[:1].isalpha():
        raise UsageError(f"{version!r:.100} is no version: give a number from 0 on, or a tag")
    return notes.check_version_name(version)


def version_named(store: Store, version: str | None) -> int | None:
    """Return the number of the version that the command line names; None where it names none."""
    wanted = None if version is None else number_or_tag(version)
    return notes.version_of(store, wanted) if isinstance(wanted, str) else wanted


def newest_slot(store: Store) -> int:
    """Return the number of the newest version, also where its manifest cannot be read."""
    newest = history.newest_slot(store)
    if newest is None:
        raise history.no_version(store)
    return newest
