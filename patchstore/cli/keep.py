"""`patchstore tag`, `retire` and `collect`: what of a run is kept."""

from typing import Annotated

import typer

from patchstore.cli import output
from patchstore.cli.options import Json, StorageOption, StoreUrl
from patchstore.cli.stores import header, open_with, version_named
from patchstore.format import kept, tags
from patchstore.format.retired import Range


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
    run = header(bucket)
    if name is None:
        for each in tags.read_all(bucket, run.run_id).values():
            _show(each, as_json=as_json)
    elif delete:
        was = kept.delete_tag(bucket, name)
        if as_json:
            output.print_json({"tag": was.name, "version": None, "was": was.version})
        else:
            output.print_line(f"{was.name}: deleted, was version {was.version}")
    elif version is None:
        found = tags.read(bucket, name, run.run_id)
        if found is None:
            # Raises, with the sentence that all commands have for it.
            tags.version_of(bucket, name)
        else:
            _show(found, as_json=as_json)
    else:
        wanted = version_named(bucket, version)
        assert wanted is not None
        _show(kept.tag(bucket, name, wanted), as_json=as_json)


def _show(tag: tags.Tag, *, as_json: bool) -> None:
    if as_json:
        output.print_json({"tag": tag.name, "version": tag.version, "created_at": tag.created_at})
    else:
        output.print_line(f"{tag.name}: version {tag.version}, since {tag.created_at}")


def retire(
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
    yes: Annotated[bool, typer.Option("--yes", help="Retire them. Without it, they are only shown.")] = False,
    option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Retire the versions that no rule keeps; tagged ones and the newest are always kept."""
    from patchstore.retention.policy import Retention
    from patchstore.retention.retire import retire

    policy = Retention(keep_last=keep_last, keep_every=keep_every, keep_days=keep_days)
    bucket = open_with(store, option)
    header(bucket)
    found = retire(bucket, policy, dry_run=not yes)
    if as_json:
        output.print_json(found.to_dict())
        return
    output.print_line(f"kept: {_ranges(found.kept)}")
    if found.num_before:
        output.print_line(f"retired before: {found.num_before:,} versions")
    if found.not_before is not None:
        output.print_line(
            f"retired: {_ranges(found.retired)}. Readers refuse these {found.num_retired:,} versions from "
            f"now on, and `patchstore collect {store} --yes` deletes their payloads after {found.not_before}"
        )
    elif found.num_retired:
        output.print_line(
            f"would be retired: {_ranges(found.retired)}, {found.num_retired:,} versions. Nothing was "
            "written; --yes retires them, which cannot be undone"
        )
    else:
        output.print_line("nothing to retire")


def _ranges(found: tuple[Range, ...], most: int = 20) -> str:
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in found]
    left = len(parts) - most
    return ", ".join(parts[:most]) + (f" and {left:,} more ranges" if left > 0 else "")


def collect(
    store: StoreUrl,
    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without it, objects are only counted.")] = False,
    keys: Annotated[bool, typer.Option("--keys", help="Also print the key of each object.")] = False,
    option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Delete payloads that no kept version needs, and what interrupted uploads left."""
    from patchstore.retention.collect import collect

    bucket = open_with(store, option)
    header(bucket)
    found = collect(bucket, dry_run=not yes)
    if as_json:
        output.print_json({**found.to_dict(), **({"keys": list(found.keys)} if keys else {})})
        return
    for key in found.keys if keys else ():
        output.print_line(key)
    done = "deleted" if found.deleted else "would be deleted"
    output.print_line(
        f"{done}: {found.num_objects:,} objects, of {found.num_versions:,} retired versions "
        f"({found.num_bytes:,} bytes) and {found.num_unnamed:,} of attempts that no version names"
    )
    for count, what in (
        (found.num_waiting, "retired versions stay until their grace period has passed"),
        (found.num_leased, "retired versions stay, as a reader holds them"),
        (
            found.num_proved,
            f"anchors that were added replace them, and {'were' if found.deleted else 'would be'} read first",
        ),
        (found.num_noted, "attempts that no version names were seen for the first time; they may go later"),
    ):
        if count:
            output.print_line(f"{count:,} {what}")
    if not found.deleted and (found.num_objects or found.num_noted):
        output.print_line("nothing was written; --yes deletes")
