"""`patchstore`: look at a bucket, prove it, rebuild a version, keep a server current.

Exit codes: 0 done, 1 any other failure, 2 wrong call, 3 stored data is wrong, 4 store or server
unavailable, 5 another publisher has the run, 130 interrupted, 141 the reader of the output went away
(`| head`), 143 terminated.
"""

import json
import logging
import os
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from patchstore import __version__, layout, log, report
from patchstore.errors import (
    DataError,
    HostError,
    LineageError,
    PatchstoreError,
    ServerUnavailable,
    StoreUnavailable,
    UsageError,
    VersionConflict,
    VersionNotFound,
)
from patchstore.model import Manifest, StoreHeader
from patchstore.stores import Store, open_store
from patchstore.sums import read_sums

# torch takes seconds to import, so commands that need it import it themselves.

app = typer.Typer(
    help="Exact, whole, fast: versions of model weights in an object store.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

StoreUrl = Annotated[
    str, typer.Argument(metavar="STORE", help="A folder, s3://bucket/prefix or another URL.")
]
Version = Annotated[
    int | None, typer.Argument(metavar="VERSION", min=0, help="A number; the newest by default.")
]
Option = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="KEY=VALUE",
        help="Storage option, such as endpoint_url=...; values may be JSON; repeatable.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output, one object a line.")]


@app.command("log")
def log_command(
    store: StoreUrl,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Newest versions to list.")] = 20,
    option: Option = None,
    as_json: Json = False,
) -> None:
    """List versions, newest first."""
    bucket = _open(store, option)
    header = _header(bucket)
    newest = _newest_slot(bucket)
    with ThreadPoolExecutor(log.READ_AHEAD, thread_name_prefix="patchstore-log") as pool:
        versions = list(pool.map(partial(_slot, bucket), range(newest, max(-1, newest - limit), -1)))
    if as_json:
        for found in versions:
            report.print_json(
                found.to_dict() if isinstance(found, report.Unreadable) else report.summary(found)
            )
    else:
        report.print_log(header, versions)
    unreadable = [found for found in versions if isinstance(found, report.Unreadable)]
    for each in unreadable:
        report.print_error(each.error.kind, str(each.error))
    if unreadable:
        raise typer.Exit(_EXIT_CODES[DataError])


def _newest_slot(store: Store) -> int:
    try:
        return _head(store).version
    except DataError:
        # Perhaps of the newest manifest itself. Which slots there are, their names say too.
        listed = (layout.manifest_version(key) for key in store.list(layout.VERSIONS))
        newest = max((version for version in listed if version is not None), default=None)
        if newest is None:
            raise
        return newest


def _slot(store: Store, version: int) -> Manifest | report.Unreadable:
    try:
        return log.read_manifest(store, version)
    except (DataError, VersionNotFound) as exc:
        return report.Unreadable(version=version, error=exc)


@app.command()
def show(
    store: StoreUrl,
    version: Version = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="Each tensor's digest sums too.")] = False,
    option: Option = None,
    as_json: Json = False,
) -> None:
    """Show one version: its lineage, payloads and digests."""
    bucket = _open(store, option)
    header = _header(bucket)
    found = _head(bucket) if version is None else log.read_manifest(bucket, version)
    sums = read_sums(bucket, header.schema, found) if tensors else None
    if as_json:
        report.print_json(report.full(found, sums))
    else:
        report.print_table(report.show_table(found, sums))


@app.command()
def verify(
    store: Annotated[
        str | None,
        typer.Argument(metavar="STORE", help="With --server, the one it follows by default."),
    ] = None,
    version: Version = None,
    every: Annotated[bool, typer.Option("--all", help="Every version, each from its anchor.")] = False,
    server: Annotated[
        str | None,
        typer.Option("--server", metavar="URL", help="Check what this server serves, while it does."),
    ] = None,
    option: Option = None,
    as_json: Json = False,
) -> None:
    """Rebuild a version in memory, tensor by tensor, and check every digest; or check a server's weights."""
    if every and (version is not None or server is not None):
        raise typer.BadParameter("name a version, a server or --all, not two of them")
    if server is not None:
        _verify_server(store, version, server, option, as_json=as_json)
        return
    if store is None:
        raise typer.BadParameter("name a store, or a server with --server")
    bucket = _open(store, option)
    _header(bucket)
    if every:
        _verify_all(bucket, as_json=as_json)
        log.check_newest(bucket, log.head(bucket))
    elif version is not None:
        _verify_version(bucket, version, as_json=as_json)
    else:
        newest = _head(bucket)
        log.check_newest(bucket, newest)
        _verify_version(bucket, newest.version, as_json=as_json)


def _verify_version(bucket: Store, version: int, *, as_json: bool) -> None:
    from patchstore import rebuild

    with report.progress(f"version {version}", shown=not as_json) as progress:
        found = rebuild.verify(bucket, version, progress=progress)
    if as_json:
        report.print_json({**report.summary(found), "verified": True})
    else:
        report.print_line(f"version {version}: payloads and state {report.short(found.state.total)} verified")


def _verify_all(bucket: Store, *, as_json: bool) -> None:
    """Verify every version; one that is damaged says nothing about the next."""
    versions = range(_newest_slot(bucket) + 1)
    num_wrong = 0
    for version in versions:
        try:
            _verify_version(bucket, version, as_json=as_json)
        except PatchstoreError as exc:
            if isinstance(exc, StoreUnavailable | HostError):
                raise
            num_wrong += 1
            if as_json:
                damaged = report.Unreadable(version=version, error=exc)
                report.print_json({**damaged.to_dict(), "verified": False})
            report.print_error(exc.kind, f"version {version}: {exc}")
    if not as_json:
        report.print_line(f"{len(versions) - num_wrong} of {len(versions)} versions verified")
    if num_wrong:
        raise typer.Exit(_EXIT_CODES[DataError])


def _verify_server(
    store: str | None, version: int | None, server: str, option: list[str] | None, *, as_json: bool
) -> None:
    from patchstore.integrations.proof import prove
    from patchstore.integrations.vllm_server import VllmServer

    with VllmServer(server) as inference:
        url = store or inference.status().store
        if url is None:
            raise UsageError(f"{server} follows no store; name one")
        proof = prove(_open(url, option), inference, version)
    rest = {"computed": len(proof.computed), "unproved": len(proof.unproved)}
    if as_json:
        served = {"server": inference.url, "num_proved": proof.num_proved, **rest, "verified": True}
        served["num_engines"] = proof.num_engines
        report.print_json({**report.summary(proof.manifest), **served})
        return
    unseen = "".join(f", {count} {kind}" for kind, count in rest.items() if count)
    if proof.num_engines > 1:
        unseen += f", in each of {proof.num_engines} engines"
    report.print_line(
        f"{inference.url} serves version {proof.manifest.version}, state "
        f"{report.short(proof.manifest.state.total)}: {proof.num_proved} tensors verified{unseen}"
    )


@app.command()
def replay(
    store: StoreUrl,
    out: Annotated[str, typer.Argument(metavar="OUT", help="A folder that does not exist yet.")],
    version: Version = None,
    option: Option = None,
    as_json: Json = False,
) -> None:
    """Write a version as a checkpoint folder for transformers and vLLM."""
    _check_out(out)
    from patchstore import rebuild

    bucket = _open(store, option)
    _header(bucket)
    with report.progress("replay", shown=not as_json) as progress:
        found = rebuild.replay(bucket, version, out=out, progress=progress)
    if as_json:
        report.print_json({**report.summary(found), "out": out})
    else:
        report.print_line(
            f"version {found.version}, step {found.step}: {out}, state {report.short(found.state.total)}"
        )


@app.command()
def transcode(
    store: StoreUrl,
    out: Annotated[str, typer.Argument(metavar="OUT", help="A file that does not exist yet.")],
    version: Version = None,
    encoding: Annotated[str, typer.Option("--encoding", "-e", help="raw, gap or context.")] = "gap",
    option: Option = None,
    as_json: Json = False,
) -> None:
    """Write a version's delta in another encoding, as a file of its own."""
    _check_out(out)
    from patchstore.transcode import transcode

    bucket = _open(store, option)
    _header(bucket)
    wanted = _head(bucket).version if version is None else version
    found, num_bytes = transcode(bucket, wanted, encoding=encoding, out=out)
    if as_json:
        report.print_json({**report.summary(found), "out": out, "size": num_bytes, "as": encoding})
    else:
        assert found.delta is not None
        report.print_line(
            f"version {found.version}: {out}, {encoding}, {num_bytes:,} bytes "
            f"({found.delta.encoding}: {found.delta.num_bytes:,})"
        )


class Commit(StrEnum):
    """How a version is written."""

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"
    IN_PLACE = "in-place"


class PrefixCache(StrEnum):
    """What becomes of keys and values that older weights computed."""

    RESET = "reset"
    KEEP = "keep"


class LogFormat(StrEnum):
    """What the log consists of."""

    TEXT = "text"
    JSON = "json"


@app.command()
def follow(
    store: StoreUrl,
    *,
    server: Annotated[
        list[str] | None,
        typer.Option("--server", metavar="URL", help="A vLLM server with the delta backend; repeatable."),
    ] = None,
    servers_file: Annotated[
        Path | None,
        typer.Option(help="A file with a server's URL a line, read again when it changes."),
    ] = None,
    at: Annotated[
        int | None, typer.Option(min=0, help="Hold at this version, instead of following the newest.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="A file that keeps what /hold and /release were told.")
    ] = None,
    commit: Annotated[
        Commit, typer.Option(help="Pause for the write and keep, await or abort requests; or do not pause.")
    ] = Commit.KEEP,
    prefix_cache: Annotated[
        PrefixCache, typer.Option(help="Reset or keep what older weights computed.")
    ] = PrefixCache.RESET,
    min_interval: Annotated[
        float, typer.Option(min=0, help="Least seconds between two versions of a server.")
    ] = 0.0,
    prove_every: Annotated[
        float | None, typer.Option(min=1, help="Seconds between proofs of what each server serves.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(metavar="[HOST:]PORT", help="Serve /metrics, /healthz and /hold; on 127.0.0.1."),
    ] = None,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds that something may go wrong before /healthz says so.")
    ] = 60.0,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that steps under way may take after SIGTERM.")
    ] = 30.0,
    poll: Annotated[float, typer.Option(min=0.01, help="Seconds between looks at the most.")] = 2.0,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that one call may take, an anchor's too.")
    ] = 600.0,
    log_format: Annotated[
        LogFormat | None,
        typer.Option(help="Log all events to standard error, instead of lines on standard output."),
    ] = None,
    option: Option = None,
    as_json: Json = False,
) -> None:
    """Keep servers at the newest version, or hold them at one, until SIGTERM or Ctrl-C."""
    from patchstore.integrations import logs, service

    if log_format is not None:
        logs.configure(as_json=log_format is LogFormat.JSON)
    elif logging.getLogger().level > logging.INFO:
        # Standard output says all of it.
        logging.getLogger(service.__name__).setLevel(logging.CRITICAL)
    settings = service.Settings(
        servers=server or [],
        servers_file=servers_file,
        storage_options=_parsed(option),
        at=at,
        state=state,
        commit=commit.value,
        prefix_cache=prefix_cache.value,
        commit_interval_s=min_interval,
        prove_every_s=prove_every,
        listen=listen,
        patience_s=patience,
        grace_s=grace,
        timeout_s=timeout,
        max_interval_s=poll,
    )
    bucket, stop = _open(store, option), service.stop_on_signals()
    # Closed also where nobody reads what is printed, so that switches under way are ended.
    with closing(service.follow(bucket, settings, stop)) as events:
        for told in events:
            if as_json:
                report.print_json(told.to_dict())
            elif log_format is None:
                report.print_line(str(told))


@app.command()
def doctor(
    store: StoreUrl,
    server: Annotated[
        list[str] | None,
        typer.Option("--server", metavar="URL", help="A vLLM server that follows it, or shall; repeatable."),
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Leave out what writes, for those who only follow.")
    ] = False,
    size: Annotated[int, typer.Option(min=1, help="Megabytes with which throughput is measured.")] = 32,
    option: Option = None,
    as_json: Json = False,
) -> None:
    """Say what works and what does not, before you train; exit code 1 where there is a problem."""
    from patchstore.integrations.doctor import examine

    found = []
    examination = examine(
        store,
        server or [],
        storage_options=_parsed(option),
        read_only=read_only,
        num_bytes=size * 1_000_000,
    )
    # Closed also where nobody reads what is printed, so that nothing is left behind.
    with closing(examination) as findings:
        for finding in findings:
            found.append(finding)
            if as_json:
                report.print_json(finding.to_dict())
    if not as_json:
        report.out.print(report.findings_table(found))
    if any(finding.level == "problem" for finding in found):
        raise typer.Exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__, flush=True)
        raise typer.Exit


@app.callback()
def _root(
    verbose: Annotated[bool, typer.Option("--verbose", help="Log what happens to standard error.")] = False,
    _show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


def _open(url: str, options: list[str] | None) -> Store:
    return open_store(url, **_parsed(options))


_CREDENTIALS = {"key", "secret", "token", "gateway_key", "gateway_secret", "username", "password"}
"""Text, also where they look like numbers: 12345e67."""


def _parsed(options: list[str] | None) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    for option in options or []:
        key, separator, value = option.partition("=")
        if not separator or not key:
            raise typer.BadParameter(f"--option takes KEY=VALUE, not {option!r}")
        parsed[key] = value if key in _CREDENTIALS else _option_value(value)
    return parsed


def _option_value(text: str) -> Any:
    """A JSON number, truth value, list or object as what it is, and anything else as text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if isinstance(value, str) else value


def _check_out(out: str) -> None:
    """Refuse what is more likely a version whose OUT was left out."""
    if out.isdecimal():
        raise UsageError(f"{out} is no place to write to; give OUT before the version, or ./{out}")


def _header(store: Store) -> StoreHeader:
    header = log.read_header(store)
    if header is None:
        path = None if "://" in store.url else Path(store.url)
        found = "is no folder" if path is not None and not path.is_dir() else "holds no run"
        raise VersionNotFound(f"{store.url} {found}; check the URL, or publish a version there")
    return header


def _head(store: Store) -> Manifest:
    newest = log.head(store)
    if newest is None:
        raise VersionNotFound(f"{store.url} holds a run without a version yet; publish one")
    return newest


_EXIT_CODES: dict[type[PatchstoreError], int] = {
    UsageError: 2,
    DataError: 3,
    LineageError: 3,
    StoreUnavailable: 4,
    ServerUnavailable: 4,
    VersionConflict: 5,
}


def main() -> None:
    """Run the command line; errors become one line and an exit code, never a traceback."""
    as_json = "--json" in sys.argv
    if sys.stdout is None or sys.stderr is None:
        # Closed by the caller. What would be printed there is lost, so this is no success.
        sys.exit("error (os): standard output is closed; send it to a file or to /dev/null")
    # A name that the terminal cannot show is no reason to fail.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    # So that what was begun is cleaned up, as with Ctrl-C; `follow` has handlers of its own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(app(standalone_mode=False))
    except SystemExit as exc:
        # typer and rich end the process themselves when nobody reads what they print.
        if isinstance(exc.__context__, BrokenPipeError):
            _end_unread()
        raise
    except BrokenPipeError:
        _end_unread()
    except PatchstoreError as exc:
        code = next((code for kind, code in _EXIT_CODES.items() if isinstance(exc, kind)), 1)
        _explain(exc.kind, str(exc), as_json=as_json)
        sys.exit(code)
    except OSError as exc:
        _explain("os", str(exc), as_json=as_json)
        sys.exit(1)
    except Exception as exc:
        if isinstance(exc, _WRONG_CALL):
            _explain_call(exc, as_json=as_json)
            sys.exit(2)
        logging.getLogger(__name__).info("internal error", exc_info=True)
        _explain("internal", f"{type(exc).__name__}: {exc}", as_json=as_json)
        sys.exit(1)


_WRONG_CALL = typer.BadParameter.__mro__[1]
"""The class of all that typer has to say against a call; it does not export it."""

_HINTS = {
    "--version": "the version is an argument without a name: patchstore replay STORE OUT 12",
    "-v": "the version is an argument without a name: patchstore replay STORE OUT 12",
    "--verbose": "it comes before the command: patchstore --verbose doctor STORE",
}


def _explain_call(exc: Any, *, as_json: bool) -> None:
    message = exc.format_message()
    if not message:
        # There were no arguments, and the help was shown instead.
        return
    # Releases of typer and click differ in how they write it.
    if given := re.match(r"No such option:? '?(-[^\s']*[^\s'.])", message):
        is_number = given[1][1:].isdecimal()
        hint = "versions count from 0" if is_number else _HINTS.get(given[1])
        message = message if hint is None else f"No such option: {given[1]}; {hint}"
    if exc.ctx is not None:
        # One line, however narrow the terminal is for which typer lays it out.
        usage = " ".join(exc.ctx.get_usage().split())
        message = f"{message.rstrip('.')}. {usage}; --help says more"
    _explain(UsageError.kind, message, as_json=as_json)


def _explain(kind: str, message: str, *, as_json: bool) -> None:
    if as_json:
        # Standard output itself may be what failed.
        with suppress(OSError):
            report.print_json({"error": {"kind": kind, "message": message}})
    report.print_error(kind, message)


def _end_unread() -> NoReturn:
    """End as shells expect where the reader went away, and keep the interpreter from complaining."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(128 + signal.SIGPIPE)


if __name__ == "__main__":
    main()
