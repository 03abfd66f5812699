"""`patchstore wait`, `pin` and `unpin`: wait for servers, and tell a `follow` what they should serve."""

import time
from typing import Annotated

import typer

from patchstore.cli import output
from patchstore.cli.options import AllowRollback, Json, StorageOption
from patchstore.cli.stores import number_or_tag, open_with
from patchstore.format import tags

Named = Annotated[str, typer.Argument(metavar="VERSION", help="A number, or a tag.")]
_LISTENER = "http://127.0.0.1:9464"
Follow = Annotated[str, typer.Option(metavar="URL", help="Where patchstore follow listens.")]


def wait(
    version: Named,
    *,
    store: Annotated[
        str | None, typer.Option("--store", metavar="STORE", help="The store that has the tag.")
    ] = None,
    server: Annotated[
        list[str] | None,
        typer.Option("--server", metavar="URL", help="A vLLM server to ask itself; repeatable."),
    ] = None,
    follow: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where patchstore follow listens, to ask for all its servers."),
    ] = None,
    exactly: Annotated[bool, typer.Option("--exactly", help="A later version does not count.")] = False,
    run: Annotated[
        str | None, typer.Option(metavar="RUN", help="The run of the version; patchstore log shows it.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0, help="How long to wait, in seconds.")] = 600.0,
    patience: Annotated[
        float, typer.Option(min=0, help="How long a server may be gone, or serve another run, in seconds.")
    ] = 120.0,
    option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Wait until all servers serve a version, or a later one; exit code 6 if they do not in time."""
    from patchstore.serve.wait import wait_until

    if server and follow:
        raise typer.BadParameter("name servers, or a follow, and not both")
    wanted = number_or_tag(version)
    if isinstance(wanted, str):
        if store is None:
            raise typer.BadParameter(f"{wanted!r} is a tag: name the store that has it, with --store")
        wanted = tags.version_of(open_with(store, option), wanted)
    asked = None if server else follow or _LISTENER
    began = time.monotonic()
    served = wait_until(
        wanted,
        servers=server or (),
        follow=asked,
        exactly=exactly,
        run_id=run,
        timeout_s=timeout,
        patience_s=patience,
    )
    if as_json:
        output.print_json({"version": wanted, "servers": served, "seconds": time.monotonic() - began})
        return
    for url, serving in served.items():
        output.print_line(f"{url} serves version {serving}")


def pin(
    version: Named,
    *,
    allow_rollback: AllowRollback = False,
    follow: Follow = _LISTENER,
    as_json: Json = False,
) -> None:
    """Have a running follow bring its servers to a version, older or newer, and keep them there."""
    from patchstore.serve.follow_client import FollowClient

    with FollowClient(follow) as client:
        number = client.pin(number_or_tag(version), allow_rollback=allow_rollback)
    if as_json:
        output.print_json({"pinned": number})
    else:
        output.print_line(f"servers go to version {number}: patchstore wait {number} --exactly")


def unpin(*, follow: Follow = _LISTENER, as_json: Json = False) -> None:
    """Have a running follow bring its servers to the newest version again."""
    from patchstore.serve.follow_client import FollowClient

    with FollowClient(follow) as client:
        client.unpin()
    if as_json:
        output.print_json({"pinned": None})
    else:
        output.print_line("servers follow the newest version")
