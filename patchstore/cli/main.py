"""`patchstore`: show a bucket, verify it, rebuild a version, keep servers at the newest version.

Exit codes: 0 done, 1 any other failure, 2 wrong call or no such version, 3 stored data is wrong, 4 store or
server unavailable, 5 another publisher has the run, 6 servers did not reach a version in time, 130
interrupted, 141 the reader of the output went away (`| head`), 143 terminated.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer

from patchstore import __version__
from patchstore.cli import copies, follow, log, prune, report, serve, status, verify
from patchstore.cli.output import WRONG_CALL, exit_code, explain, explain_call
from patchstore.errors import HostError, InternalError, PatchstoreError
from patchstore.follow.logs import TextFormatter

app = typer.Typer(
    help="Versions of model weights in an object store: list, verify, rebuild, serve.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Look and check": (
        log.log,
        log.diff,
        status.status,
        report.report,
        verify.verify,
        verify.doctor,
    ),
    "Get weights": (
        copies.replay,
        copies.mirror,
    ),
    "Keep servers at a version": (serve.serve, follow.follow, follow.wait, follow.pin),
    "Look after a bucket": (prune.tag, prune.prune, copies.compact, copies.replicate, prune.sign),
}
for panel, commands in PANELS.items():
    for command in commands:
        # What `serve` does not know is an argument of vLLM.
        passes_on = {"ignore_unknown_options": command is serve.serve}
        app.command(rich_help_panel=panel, context_settings=passes_on)(command)


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
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter())
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])


def main() -> None:
    """Run the command line; errors become one line and an exit code, never a traceback."""
    as_json = "--json" in sys.argv
    if sys.stdout is None or sys.stderr is None:
        # Closed by the caller. The output would be lost, so this is a failure.
        sys.exit(f"error ({HostError.kind}): standard output is closed; send it to a file or to /dev/null")
    # A name that the terminal cannot show is no reason to fail.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    # So that cleanup runs, as with Ctrl-C; `follow` has handlers of its own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        # The same name under `python -m patchstore`: completion is installed for a command of this name.
        sys.exit(_run())
    except SystemExit as exc:
        # typer and rich end the process themselves when the reader of the output went away.
        if isinstance(exc.__context__, BrokenPipeError):
            _end_unread()
        raise
    except BrokenPipeError:
        _end_unread()
    except PatchstoreError as exc:
        explain(exc.kind, str(exc), as_json=as_json)
        sys.exit(exit_code(exc))
    except OSError as exc:
        explain(HostError.kind, str(exc), as_json=as_json)
        sys.exit(1)
    except Exception as exc:
        if isinstance(exc, WRONG_CALL):
            explain_call(exc, as_json=as_json)
            sys.exit(2)
        logging.getLogger(__name__).info("internal error", exc_info=True)
        explain(InternalError.kind, f"{type(exc).__name__}: {exc}", as_json=as_json)
        sys.exit(1)


def _run() -> Any:
    try:
        return app(standalone_mode=False, prog_name="patchstore")
    except ModuleNotFoundError as exc:
        if exc.name == "torch":
            import_module("patchstore.tensors")  # raises, and says what to install
        raise


def _end_unread() -> NoReturn:
    """End as shells expect if the reader went away, without a traceback of the interpreter."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(128 + signal.SIGPIPE)


if __name__ == "__main__":
    main()
