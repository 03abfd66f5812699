"""`patchstore replay`, `mirror`, `replicate` and `compact`: copies of versions, and shortcuts."""

import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from patchstore.bucket import history

# torch takes seconds to import: after the checks of what was asked for.
from patchstore.cli import output
from patchstore.cli.loops import (
    KeepFollowing,
    Listen,
    LogOption,
    MaxHeadAge,
    MaxPollInterval,
    UnhealthyAfter,
    loop_settings,
    set_up_log,
    shown,
)
from patchstore.cli.options import (
    AllowRollback,
    Json,
    RequireSignature,
    StorageOption,
    StoreUrl,
    Version,
    check_out,
    open_with,
    parsed,
    version_named,
)
from patchstore.signing.required import RequiredKeys
from patchstore.stores import open_store


def replay(
    store: StoreUrl,
    out: Annotated[str, typer.Argument(metavar="OUT", help="A folder that does not exist yet.")],
    version: Version = None,
    require_signature: RequireSignature = None,
    option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Write a version as a checkpoint folder for transformers and vLLM."""
    check_out(out)
    from patchstore.read import replay

    required = RequiredKeys.of(require_signature or None)
    bucket = open_with(store, option)
    history.run_header(bucket)
    with output.progress("replay", shown=not as_json) as progress:
        wanted = version_named(bucket, version)
        found = replay.replay(bucket, wanted, out=out, progress=progress, required_keys=required)
    if as_json:
        output.print_json({**output.summary(found), "out": out})
    else:
        output.print_line(
            f"version {found.version}, step {found.step}: {out}, state {output.short(found.state.total)}"
        )


def mirror(
    store: StoreUrl,
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A mirror, or a folder to make.")],
    *,
    follow: KeepFollowing = False,
    version: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="Keep this version, a number or a tag, instead of the newest."),
    ] = None,
    then: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COMMAND",
            help="Run this after each version, such as 'convert {folder} {version}'; repeatable.",
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Longest time for a command, in seconds.")] = 3600.0,
    keep: Annotated[
        int | None,
        typer.Option(min=0, help="Older versions whose folders are kept; by default 1, or 0 with --then."),
    ] = None,
    require_signature: RequireSignature = None,
    allow_rollback: AllowRollback = False,
    listen: Listen = None,
    max_head_age: MaxHeadAge = None,
    unhealthy_after: UnhealthyAfter = 60.0,
    max_poll_interval: MaxPollInterval = 2.0,
    log_format: LogOption = None,
    option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Keep a checkpoint folder at a version, verified, and run a command for each one."""
    from patchstore.follow import loop

    settings = loop_settings(follow, listen, unhealthy_after, max_poll_interval)
    if max_head_age is not None and not follow:
        raise typer.BadParameter("--max-head-age is of use only with --follow")
    set_up_log(log_format, loop.__name__)
    required = RequiredKeys.of(require_signature or None)
    bucket = open_with(store, option)
    from patchstore.ops.mirror.place import Place
    from patchstore.ops.mirror.service import Command, Mirror, once
    from patchstore.ops.mirror.service import follow as followed
    from patchstore.support.arguments import local_path

    commands = [Command(each, timeout_s=timeout) for each in then or ()]
    if not follow:
        history.run_header(bucket)
    stop = loop.stop_on_signals() if follow else threading.Event()
    at = version_named(bucket, version)
    is_shown = not (follow or as_json or log_format)
    with (
        closing(Place(local_path("folder", folder))) as place,
        output.progress("mirror", shown=is_shown) as progress,
    ):
        kept = Mirror(
            bucket,
            place,
            at=at,
            keep=keep,
            commands=commands,
            stop=stop,
            required=required,
            allow_rollback=allow_rollback,
            max_head_age_s=max_head_age,
            progress=progress,
        )
        events = followed(kept, stop, settings) if follow else once(kept)
        num_events = sum(1 for _ in shown(events, log_format, as_json=as_json))
    if not follow and not num_events and not as_json:
        output.print_line(f"{folder} has that version already, and it was verified")


def replicate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="The store that the trainer writes; with --promote, the replica alone."
        ),
    ],
    target: Annotated[
        str | None, typer.Argument(metavar="TARGET", help="An empty place, or a replica of SOURCE.")
    ] = None,
    *,
    follow: KeepFollowing = False,
    promote: Annotated[
        bool,
        typer.Option(
            "--promote", help="Open a replica to publishers, after its source was lost for good; needs --yes."
        ),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="With --promote, do it. Without it, the replica is only examined.")
    ] = False,
    source_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Storage option of SOURCE; values may be JSON; repeatable."),
    ] = None,
    target_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="The same of TARGET."),
    ] = None,
    require_signature: RequireSignature = None,
    listen: Listen = None,
    unhealthy_after: UnhealthyAfter = 60.0,
    max_poll_interval: MaxPollInterval = 2.0,
    log_format: LogOption = None,
    as_json: Json = False,
) -> None:
    """Copy all versions to another place, verified, so that servers there read a near bucket."""
    settings = loop_settings(follow, listen, unhealthy_after, max_poll_interval)
    if promote:
        if target is not None or follow or require_signature or target_option:
            raise typer.BadParameter("--promote takes the URL of the replica, its --source-option and --yes")
        _promote(source, source_option, yes=yes, as_json=as_json)
        return
    if yes:
        raise typer.BadParameter("--yes is of use only with --promote")
    if target is None:
        raise typer.BadParameter("name the TARGET, an empty place or a replica of SOURCE")
    from patchstore.follow import loop
    from patchstore.ops.replicate import service

    set_up_log(log_format, loop.__name__)
    required = RequiredKeys.of(require_signature or None)
    theirs, ours = open_store(source, **parsed(source_option)), open_store(target, **parsed(target_option))
    num_versions, num_bytes = 0, 0
    with output.progress("replicate", shown=not (follow or as_json or log_format)) as progress:
        if follow:
            events = service.follow(theirs, ours, loop.stop_on_signals(), settings, required=required)
        else:
            # Ctrl-C and SIGTERM end the command at once, as they end any other.
            stop = threading.Event()
            events = service.replicate(theirs, ours, stop, required=required, progress=progress)
        for event in shown(events, log_format, as_json=as_json):
            num_versions += event.outcome == "copied"
            num_bytes += event.num_bytes or 0
    if not follow and not as_json:
        output.print_line(
            f"{ours.url} is equal to {theirs.url}: {num_versions} versions copied, {num_bytes:,} bytes"
        )


def _promote(target: str, option: list[str] | None, *, yes: bool, as_json: bool) -> None:
    """Make a replica a place that publishers write to."""
    from patchstore.bucket import notes
    from patchstore.follow.logs import utc
    from patchstore.ops.replicate.copying import lacking

    bucket = open_with(target, option)
    mark, newest = notes.promote(bucket, utc(time.time()), dry_run=not yes)
    _, missing = lacking(bucket, newest.version)
    resume = "anchor" if missing else "auto"
    if as_json:
        record = {"run_id": mark.run_id, "source": mark.source, "promoted_at": mark.promoted_at}
        record["resume"] = resume
        output.print_json({**output.summary(newest), **record})
    elif mark.promoted_at is None:
        output.print_line(
            f"{bucket.url} would be opened to publishers. Its newest version is {newest.version} (step "
            f"{newest.step}); later versions of {mark.source} are not here. Nothing was written; --yes "
            "promotes, which cannot be undone. Do it only if that place is lost for good"
        )
    else:
        output.print_line(
            f"{bucket.url} is open to publishers since {mark.promoted_at}. Its newest version is "
            f"{newest.version} (step {newest.step}); later versions of {mark.source} are not here. Stop the "
            f'replicator, and open the publisher here with resume="{resume}"'
        )
    if missing and not as_json:
        output.print_line(
            f"Version {newest.version} cannot be rebuilt here, as {missing[0][1].key} is missing: the "
            "publisher is to begin with the whole model"
        )


def compact(
    store: StoreUrl,
    *,
    follow: KeepFollowing = False,
    anchor_every: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            help="Deltas between two anchors; auto: until they have the size of an anchor.",
        ),
    ] = "64",
    encoding: Annotated[
        str, typer.Option(help="Of rollups: gap, or context, which is smaller and takes more CPU time.")
    ] = "gap",
    scratch: Annotated[
        Path | None,
        typer.Option(help="Folder for temporary files: the deltas between two anchors; by default /tmp."),
    ] = None,
    listen: Listen = None,
    unhealthy_after: UnhealthyAfter = 60.0,
    max_poll_interval: MaxPollInterval = 30.0,
    log_format: LogOption = None,
    option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Add anchors, and rollups of many deltas, so that servers that are late or far behind read less."""
    from patchstore.follow import loop

    settings = loop_settings(follow, listen, unhealthy_after, max_poll_interval)
    bucket = open_with(store, option)
    from patchstore.ops.compact import service

    set_up_log(log_format, loop.__name__)
    with output.progress("compact", shown=not (follow or as_json or log_format)) as progress:
        compactor = service.Compactor(
            bucket, anchor_every=anchor_every, encoding=encoding, scratch=scratch, progress=progress
        )
        if follow:
            events = service.follow(compactor, loop.stop_on_signals(), settings)
        else:
            events = (done.event() for done in compactor.compact())
        more = (event.more for event in shown(events, log_format, as_json=as_json))
        num_added = sum(len(each.get("added", ())) for each in more)
    if not follow and not as_json:
        output.print_line(f"{bucket.url}: {num_added} shortcuts were added")
