"""What the demo shows on the terminal."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile

from rich.console import Console
from rich.filesize import decimal
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from patchstore import Manifest

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


def versions_table() -> Table:
    """An empty table for `add_version`."""
    table = Table(title="every step a version, every version served")
    for name in (
        "version",
        "loss",
        "changed",
        "bytes",
        "B/change",
        "publish",
        "fetch",
        "stage",
        "apply",
        "state",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def add_version(
    table: Table,
    manifest: Manifest,
    *,
    loss: float,
    share: float,
    publish_s: float,
    timings: Mapping[str, float],
    equal: bool,
) -> None:
    """Add a version.

    Args:
        share: changed elements of all elements.
        publish_s: from the end of the optimiser step to the commit.
        timings: seconds of the server's update.
        equal: whether the server's state digest is that of the trainer's weights.
    """
    delta = manifest.delta
    table.add_row(
        str(manifest.version),
        f"{loss:.2f}",
        f"{share:.2%}",
        decimal(manifest.num_bytes),
        f"{delta.num_bytes / delta.num_changed:.2f}" if delta and delta.num_changed else "-",
        f"{publish_s:.2f} s",
        f"{timings['fetch']:.3f} s",
        f"{timings['stage']:.3f} s",
        f"{timings['apply']:.3f} s",
        "[green]equal[/]" if equal else "[red]differs[/]",
    )


def generations_table(prompts: Iterable[str], before: Iterable[str], after: Iterable[str]) -> Table:
    """What the server wrote at the first version and at the last; where they part is marked."""
    table = Table(title="greedy generations of the live server", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for prompt, first, last in zip(prompts, before, after, strict=True):
        if first == last:
            table.add_row("unchanged", escape(prompt + last), end_section=True)
            continue
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
        marked = (
            f"[dim]{escape(prompt + text[:same])}[/][bold {colour}]{escape(text[same:])}[/]"
            for text, colour in ((first, "yellow"), (last, "green"))
        )
        for when, line in zip(("before", "after"), marked, strict=True):
            table.add_row(when, line, end_section=when == "after")
    return table


def proofs_table(proofs: Sequence[tuple[str, bool]]) -> Table:
    """Claims, and whether each was found true."""
    table = Table(title="verified", show_header=False)
    for claim, found in proofs:
        table.add_row("[green]yes[/]" if found else "[bold red]NO[/]", claim)
    return table
