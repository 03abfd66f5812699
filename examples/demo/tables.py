"""The tables of the demo."""

from collections.abc import Iterable, Mapping
from itertools import takewhile

from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from patchstore import Manifest


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
