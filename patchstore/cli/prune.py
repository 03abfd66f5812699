"""`patchstore tag`, `prune` and `sign`: what of a run is kept, deletion of the rest, and signatures."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchstore.bucket import history, kept, notes
from patchstore.bucket.notes import Range
from patchstore.cli import output
from patchstore.cli.options import Json, StorageOption, StoreUrl, head, open_with, version_named
from patchstore.signing import KeySigner, statement

if TYPE_CHECKING:
    from patchstore.ops.retention import Collection, Retirement


def tag(
    store: StoreUrl,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The tag; without one, all tags are listed.")
    ] = None,
    version: Annotated[
        str | None, typer.Argument(metavar="VERSION", help="The version, a number or another tag.")
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the tag.")] = False,
    option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Give a version a name, which commands take in place of its number; or list the names."""
    if delete and (name is None or version is not None):
        raise typer.BadParameter("give --delete a NAME, and no VERSION")
    bucket = open_with(store, option)
    run = history.run_header(bucket)
    if name is None:
        for each in notes.read_tags(bucket, run.run_id).values():
            _show(each, as_json=as_json)
    elif delete:
        was = kept.delete_tag(bucket, name)
        if as_json:
            output.print_json({"tag": was.name, "version": None, "was": was.version})
        else:
            output.print_line(f"{was.name}: deleted, was version {was.version}")
    elif version is None:
        found = notes.read_tag(bucket, name, run.run_id)
        if found is None:
            # Raises, with the sentence that all commands have for it.
            notes.version_of(bucket, name)
        else:
            _show(found, as_json=as_json)
    else:
        wanted = version_named(bucket, version)
        assert wanted is not None
        _show(kept.tag(bucket, name, wanted), as_json=as_json)


def _show(tag: notes.Tag, *, as_json: bool) -> None:
    if as_json:
        output.print_json({"tag": tag.name, "version": tag.version, "created_at": tag.created_at})
    else:
        output.print_line(f"{tag.name}: version {tag.version}, since {tag.created_at}")


def prune(
    store: StoreUrl,
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", metavar="N", min=1, help="Keep the newest N versions.")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option("--keep-every", metavar="K", min=1, help="Keep each K-th version.")
    ] = None,
    keep_days: Annotated[
        float | None, typer.Option("--keep-days", metavar="D", min=0, help="Keep versions of D days.")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it. Without it, it is only shown and nothing is written.")
    ] = False,
    keys: Annotated[bool, typer.Option("--keys", help="Also print the key of each deleted object.")] = False,
    option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Retire the versions that no --keep rule keeps, and delete what was retired a day ago.

    Tagged versions and the newest are always kept. Without a rule no version is retired. What interrupted
    uploads left is deleted too, a day after it was first seen.
    """
    from patchstore.ops.retention import Retention, collect, retire

    rules = {"keep_last": keep_last, "keep_every": keep_every, "keep_days": keep_days}
    has_rule = any(each is not None for each in rules.values())
    policy = Retention(**rules) if has_rule else None  # type: ignore[arg-type]
    bucket = open_with(store, option)
    history.run_header(bucket)
    with output.waiting("prune", shown=not as_json):
        retirement = None if policy is None else retire(bucket, policy, dry_run=not yes)
        found = collect(bucket, dry_run=not yes)
    if as_json:
        retired = {} if retirement is None else retirement.to_dict()
        output.print_json({**retired, **found.to_dict(), **({"keys": list(found.keys)} if keys else {})})
        return
    if retirement is not None:
        _show_retirement(retirement)
    for key in found.keys if keys else ():
        output.print_line(key)
    _show_collection(found)
    if not yes:
        output.print_line("nothing was written; --yes does it, which cannot be undone")


def _show_retirement(found: "Retirement") -> None:
    output.print_line(f"kept: {_ranges(found.kept)}")
    if found.num_before:
        output.print_line(f"retired before: {found.num_before:,} versions")
    if found.not_before is not None:
        output.print_line(
            f"retired: {_ranges(found.retired)}. Readers refuse these {found.num_retired:,} versions from "
            f"now on; prune again after {found.not_before}, which deletes their payloads"
        )
    elif found.num_retired:
        output.print_line(f"would be retired: {_ranges(found.retired)}, {found.num_retired:,} versions")
    else:
        output.print_line("nothing to retire")


def _ranges(found: tuple[Range, ...], most: int = 20) -> str:
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in found]
    left = len(parts) - most
    return ", ".join(parts[:most]) + (f" and {left:,} more ranges" if left > 0 else "")


def _show_collection(found: "Collection") -> None:
    done = "deleted" if found.deleted else "would be deleted"
    output.print_line(
        f"{done}: {found.num_objects:,} objects, of {found.num_versions:,} retired versions "
        f"({found.num_bytes:,} bytes) and {found.num_unnamed:,} of attempts that no version names"
    )
    for count, what in (
        (found.num_waiting, "retired versions stay until their grace period has passed"),
        (found.num_reserved, "retired versions stay, as a publisher is about to build on them"),
        (
            found.num_proved,
            f"anchors that were added replace them, and {'were' if found.deleted else 'would be'} read first",
        ),
        (found.num_noted, "attempts that no version names were seen for the first time; they may go later"),
    ):
        if count:
            output.print_line(f"{count:,} {what}")


PASSWORD = "PATCHSTORE_KEY_PASSWORD"  # noqa: S105 # nosec B105 # the name of a variable
"""Environment variable: of the private key."""


def sign(
    store: StoreUrl,
    *,
    key: Annotated[
        Path,
        typer.Option(
            "--key", metavar="PRIVATE_KEY", help=f"A private key in PEM; ${PASSWORD} is its password, if any."
        ),
    ],
    first: Annotated[int, typer.Option("--from", min=0, help="The first version to sign.")] = 0,
    last: Annotated[
        int | None, typer.Option("--to", min=0, help="The last one; the newest by default.")
    ] = None,
    option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Sign versions that exist, without verifying their payloads: you vouch for their manifests."""
    signer = KeySigner(key, password=os.environ.get(PASSWORD))
    bucket = open_with(store, option)
    run, newest = history.run_header(bucket), head(bucket).version
    until = newest if last is None else last
    if until > newest or first > until:
        raise typer.BadParameter(f"versions are 0 to {newest}, so there is nothing from {first} to {until}")
    num_signed = 0
    with output.versions_progress("versions", shown=not as_json, total=until - first + 1) as advance:
        for version in range(first, until + 1):
            is_new = statement.sign_version(bucket, signer, run, version)
            num_signed += is_new
            if as_json and is_new:
                output.print_json({"version": version, "key": signer.public_key.name})
            advance()
    if not as_json:
        output.print_line(
            f"{num_signed} of {until - first + 1} versions signed by the key {signer.public_key.name}; "
            "the others were signed before"
        )
