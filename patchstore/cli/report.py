"""`patchstore report`: one page about a run, as a file or served while the run goes on."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchstore.bucket import history
from patchstore.cli import output
from patchstore.cli.options import Json, StorageOptionWithoutO, StoreUrl, open_with
from patchstore.errors import DataError, NotFound
from patchstore.support import host

if TYPE_CHECKING:
    from patchstore.ops.report.page import Report


def report(
    store: StoreUrl,
    *,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="The page to write, such as run.html.")
    ] = None,
    learning_rate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="JSON lines with step, and learning_rate or lr, as trainers log them."
        ),
    ] = None,
    follow_log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What patchstore follow --json printed, or its log in JSON."),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Serve the page and renew it, until SIGTERM or Ctrl-C.")
    ] = False,
    listen: Annotated[
        str | None,
        typer.Option(metavar="[HOST:]PORT", help="With --live, where; by default a free port of 127.0.0.1."),
    ] = None,
    option: StorageOptionWithoutO = None,
    as_json: Json = False,
) -> None:
    """Write a page about a run: what changed, bytes, commits, layers, marks, and what servers served."""
    if live == (out is not None):
        raise typer.BadParameter("name the page to write with -o FILE, or give --live, and not both")
    if out is not None and (not out.name or out.is_dir()):
        raise typer.BadParameter(f"{out} is a folder: name the page to write, such as run.html")
    if out is not None and not out.parent.is_dir():
        raise typer.BadParameter(f"{out} cannot be made: {out.parent} is no folder")
    if listen is not None and not live:
        raise typer.BadParameter("--listen is of use only with --live")
    from patchstore.ops.report.page import Report, one_page

    bucket = open_with(store, option)
    history.run_header(bucket)
    made = Report(bucket, learning_rate=learning_rate, events=follow_log)
    if out is None:
        _serve(made, listen or "0", as_json=as_json)
        return
    text, shown = one_page(made)
    host.replace_text(out, text)
    if as_json:
        output.print_json({"path": str(out), "versions": len(shown.versions), "bytes": len(text)})
    else:
        output.print_line(f"{out}: {len(shown.versions):,} versions, {len(text):,} bytes")
    for error in shown.errors:
        output.print_error(error.kind, str(error))
    if any(isinstance(error, DataError | NotFound) for error in shown.errors):
        raise typer.Exit(output.EXIT_CODES[DataError])


def _serve(made: "Report", listen: str, *, as_json: bool) -> None:
    """Serve the page until the process is to end."""
    from patchstore.follow import loop
    from patchstore.follow.http_api import Answer, Listener
    from patchstore.ops.report.page import PATHS

    def answer(method: str, path: str, query: str, _accept: str, _body: bytes) -> Answer:
        if method != "GET" or path not in PATHS:
            raise NotFound(f"there is no {method} {path}")
        return made.answer(path, query)

    # Once here, so that what is wrong with the call is said here and not in a browser.
    made.answer(PATHS[0])
    stop = loop.stop_on_signals()
    with Listener(loop.address_of(listen), answer) as listener:
        if as_json:
            output.print_json({"url": listener.url})
        else:
            output.print_line(f"{listener.url} shows the run until Ctrl-C")
        stop.wait()
