"""`patchstore mirror`: a checkpoint folder on this machine that is kept at a version."""

import threading
from typing import Annotated

import typer

from patchstore.cli import output
from patchstore.cli.options import AllowRollback, Json, RequireSignature, StorageOption, StoreUrl
from patchstore.cli.stores import header, open_with
from patchstore.cli.watching import (
    KeepFollowing,
    Listen,
    LogOption,
    MaxHeadAge,
    MaxPollInterval,
    UnhealthyAfter,
    set_up_log,
    shown,
)
from patchstore.signing.required import RequiredKeys


def mirror(
    store: StoreUrl,
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A mirror, or a folder to make.")],
    *,
    follow: KeepFollowing = False,
    version: Annotated[
        int | None, typer.Option(min=0, help="Keep this version, instead of the newest.")
    ] = None,
    then: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COMMAND",
            help="Run this after each version, such as 'convert {folder} {version}'; repeatable.",
        ),
    ] = None,
    post: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Post JSON to this URL after each version; repeatable."),
    ] = None,
    post_body: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="What to post; by default what SGLang takes."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Longest time for a command or an answer, in seconds.")
    ] = 3600.0,
    keep: Annotated[
        int | None,
        typer.Option(
            min=0, help="Older versions whose folders are kept; by default 1, or 0 with --then or --post."
        ),
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
    """Keep a checkpoint folder at a version, verified, and tell a command or a server of each one."""
    from patchstore.mirror.consumers import BODY, Command, Consumer, Post
    from patchstore.serve import progress
    from patchstore.serve.service import stop_on_signals

    if listen is not None and not follow:
        raise typer.BadParameter("--listen is of use only with --follow")
    if max_head_age is not None and not follow:
        raise typer.BadParameter("--max-head-age is of use only with --follow")
    if post_body is not None and not post:
        raise typer.BadParameter("--post-body is of use only with --post")
    set_up_log(log_format, progress.__name__)
    consumers: list[Consumer] = [Command(each, timeout_s=timeout) for each in then or ()]
    consumers += [Post(each, body=post_body or BODY, timeout_s=timeout) for each in post or ()]
    required = RequiredKeys.of(require_signature or None)
    bucket = open_with(store, option)
    # Imports torch, which takes seconds: after the checks of what was asked for.
    from patchstore.mirror import service

    if follow:
        events = service.follow(
            bucket,
            folder,
            stop_on_signals(),
            at=version,
            keep=keep,
            consumers=consumers,
            required=required,
            allow_rollback=allow_rollback,
            max_head_age_s=max_head_age,
            listen=listen,
            unhealthy_after_s=unhealthy_after,
            max_poll_interval_s=max_poll_interval,
        )
    else:
        header(bucket)
        events = service.mirror(
            bucket,
            folder,
            at=version,
            keep=keep,
            consumers=consumers,
            stop=threading.Event(),
            required=required,
            allow_rollback=allow_rollback,
        )
    num_events = sum(1 for _ in shown(events, log_format, as_json=as_json))
    if not follow and not num_events and not as_json:
        output.print_line(f"{folder} has that version already, and it was verified")
