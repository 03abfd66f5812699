"""What an example shows on the terminal, or writes where its output is a pipe or a file."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table

# Pipes and CI logs have no width of their own, and 80 columns would cut the table of versions.
console = Console(width=None if Console().is_terminal else 110, highlight=False)


# Where there is no terminal, a spinner prints nothing: who reads a log takes a silent program for a dead one.
HEARTBEAT_S = 5.0
_REDRAW_S = 0.5


@contextmanager
def stage(what: str, progress: Callable[[], str] = str) -> Iterator[None]:
    """Say what is going on, every few seconds how far it is, and afterwards how long it took.

    Args:
        progress: how far it is, in words. A thread calls it.
    """
    began = time.monotonic()
    ended = threading.Event()

    def beat(say: Callable[[str], object], every_s: float) -> None:
        while not ended.wait(every_s):
            far = ", ".join(filter(None, (progress(), f"{time.monotonic() - began:.0f} s so far")))
            say(f"{what}: {far}")

    # The status prints nothing where there is no terminal.
    with console.status(what) as status:
        beating = (status.update, _REDRAW_S) if console.is_terminal else (console.print, HEARTBEAT_S)
        thread = threading.Thread(target=beat, args=beating, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
    console.print(f"{what} [dim]({time.monotonic() - began:.1f} s)[/]")


def train(what: str, steps: Iterable[float], num_steps: int) -> None:
    """Take the steps of a training, each of which gives its loss; say how far it is, and what it learnt."""
    losses: list[float] = []
    began = time.monotonic()

    def progress() -> str:
        if not losses:
            return f"step 1 of {num_steps}"
        left_s = (time.monotonic() - began) / len(losses) * (num_steps - len(losses))
        return f"step {len(losses)} of {num_steps}, loss {losses[-1]:.2f}, about {left_s:.0f} s left"

    with stage(what, progress):
        for loss in steps:
            losses += [loss]
    console.print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")


@contextmanager
def growing(what: str, table: Table) -> Iterator[None]:
    """Show a table while it grows; where there is no terminal, say how far it is, and show it complete."""
    if console.is_terminal:
        with Live(table, console=console):
            yield
    else:
        with stage(what, lambda: f"{table.row_count} so far"):
            yield
        console.print(table)


def proofs_table(proofs: Sequence[tuple[str, bool]]) -> Table:
    """Claims, and whether each was found true."""
    table = Table(title="verified", show_header=False)
    for claim, found in proofs:
        table.add_row("[green]yes[/]" if found else "[bold red]NO[/]", claim)
    return table
