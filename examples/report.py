"""What an example shows on the terminal."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table

# Pipes and CI logs have no width of their own, and 80 columns would cut the table of versions.
console = Console(width=None if Console().is_terminal else 110, highlight=False)


@contextmanager
def stage(what: str) -> Iterator[None]:
    """Say what is going on, and afterwards how long it took."""
    began = time.monotonic()
    with console.status(what):
        yield
    console.print(f"{what} [dim]({time.monotonic() - began:.1f} s)[/]")


@contextmanager
def shown(table: Table) -> Iterator[None]:
    """Show a table while it grows; where there is no terminal, once it is complete."""
    if console.is_terminal:
        with Live(table, console=console):
            yield
    else:
        yield
        console.print(table)


def proofs_table(proofs: Sequence[tuple[str, bool]]) -> Table:
    """Claims, and whether each was found true."""
    table = Table(title="verified", show_header=False)
    for claim, found in proofs:
        table.add_row("[green]yes[/]" if found else "[bold red]NO[/]", claim)
    return table
