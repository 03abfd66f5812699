"""What the commands have in common that go on: `follow`, `mirror`, `replicate` and `compact`."""

import logging
from collections.abc import Generator, Iterator
from contextlib import closing
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import typer

from patchstore.cli import output

if TYPE_CHECKING:
    from patchstore.follow.loop import LoopSettings


class LogFormat(StrEnum):
    """The form of the log."""

    TEXT = "text"
    JSON = "json"


UnhealthyAfter = Annotated[
    float, typer.Option(min=0, help="Seconds a failure may last before /healthz reports it.")
]
MaxHeadAge = Annotated[
    float | None,
    typer.Option(min=1, help="Report a newest version that is older, in seconds by the trainer's clock."),
]
MaxPollInterval = Annotated[float, typer.Option(min=0.01, help="Longest time between polls, in seconds.")]
LogOption = Annotated[
    LogFormat | None,
    typer.Option(help="Log all events to standard error, instead of lines on standard output."),
]
Listen = Annotated[
    str | None,
    typer.Option(metavar="[HOST:]PORT", help="With --follow, serve /metrics and /healthz; on 127.0.0.1."),
]
KeepFollowing = Annotated[
    bool, typer.Option("--follow", help="Go on with new versions, until SIGTERM or Ctrl-C.")
]


class _Event(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


E = TypeVar("E", bound=_Event)


def loop_settings(
    is_followed: bool, listen: str | None, unhealthy_after: float, max_poll_interval: float
) -> "LoopSettings":
    """Return the settings of a loop; refuse a listener where there is none."""
    from patchstore.follow.loop import LoopSettings

    if listen is not None and not is_followed:
        raise typer.BadParameter("--listen is of use only with --follow")
    return LoopSettings(
        listen=listen, unhealthy_after_s=unhealthy_after, max_poll_interval_s=max_poll_interval
    )


def set_up_log(log_format: LogFormat | None, module: str) -> None:
    """Log to standard error in a form; with None, leave out what `shown` prints.

    Args:
        module: the name of the logger that the command's events go to.
    """
    from patchstore.follow import logs

    if log_format is not None:
        logs.configure(as_json=log_format is LogFormat.JSON)
    elif logging.getLogger().level > logging.INFO:
        logging.getLogger(module).setLevel(logging.CRITICAL)


def shown(events: Generator[E], log_format: LogFormat | None, *, as_json: bool) -> Iterator[E]:
    """Print each event on standard output, unless it is logged, and yield it.

    The events are closed at the end, also if the reader of the output went away: what is under way is ended.
    """
    with closing(events):
        for event in events:
            if as_json:
                output.print_json(event.to_dict())
            elif log_format is None:
                output.print_line(str(event))
            yield event
