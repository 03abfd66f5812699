"""`patchstore serve`: vLLM, started for a run and kept at its newest version."""

from contextlib import suppress
from typing import Annotated

import typer

from patchstore.bucket import history
from patchstore.cli import output
from patchstore.cli.follow import Adapter
from patchstore.cli.loops import set_up_log, shown
from patchstore.cli.options import Json, open_with, parsed
from patchstore.errors import ServerUnavailable
from patchstore.follow.settings import Settings
from patchstore.support import tracing


def serve(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="MODEL", help="The model, and behind it any arguments of vllm serve."),
    ],
    *,
    store: Annotated[
        str, typer.Option("--store", metavar="STORE", help="The run whose newest version is served.")
    ],
    adapter: Adapter = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="Storage option, as of follow; repeatable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Start vLLM with all that updates need, and keep it at the run's newest version."""
    from patchstore.follow import launch, loop, service
    from patchstore.follow.desired import check_kind

    bucket = open_with(store, option)
    found = history.read_header(bucket)
    if found is not None:
        check_kind(bucket, found, adapter)
    started = launch.launch_of(arguments, bucket.url, adapter, found)
    if as_json:
        output.print_json({"event": "starting", "server": started.url, "command": str(started)})
    else:
        output.print_line(str(started))
    set_up_log(None, service.__name__)
    stop = loop.stop_on_signals()
    settings = Settings(
        servers=[started.url], headers=started.headers, storage_options=parsed(option), adapter=adapter
    )
    with launch.VllmProcess(started, stop) as process:
        # Here, as what it says of this process is not for vLLM.
        tracing.export()
        # A server that ended in the middle of an update is what `process.code` reports.
        if process.wait_until_healthy():
            with suppress(ServerUnavailable):
                for _ in shown(service.follow(bucket, settings, stop), None, as_json=as_json):
                    pass
    if process.code is not None:
        how = "closed its port and did not end, so it was killed" if process.was_killed else "ended by itself"
        message = f"vLLM {how}, with status {process.code}: its output above says why"
        output.explain(ServerUnavailable.kind, message, as_json=as_json)
        raise typer.Exit(process.code or 1)
