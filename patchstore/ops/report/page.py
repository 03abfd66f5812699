"""One HTML page about a run, with all that it needs: plotly.js, figures and texts. It asks no other host for
anything, and its policy forbids that to what a bucket may have smuggled in.
"""

import base64
import hashlib
import html
import importlib.resources
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchstore.bucket import history
from patchstore.errors import StoreUnavailable, UsageError
from patchstore.follow.logs import utc
from patchstore.ops.report import figures
from patchstore.ops.report.figures import Chart
from patchstore.ops.report.logs import Happened, follow_log, learning_rates
from patchstore.ops.report.recorded import Reader, Recorded
from patchstore.read.versions import Version
from patchstore.stores.base import Store
from patchstore.support.printable import escaped, json_line

if TYPE_CHECKING:
    from patchstore.follow.http_api import Answer
    from patchstore.ops.report.layers import Sampler

PATHS = ("/", "/report.json")
"""Of a page that is served."""
_MOST_ERRORS = 20
RENEW_S = 10
"""How often a page that is served asks for what is new, and how long an answer counts."""


class Report:
    """The page of one run, made anew as the run grows. For any thread."""

    def __init__(
        self,
        store: Store,
        *,
        learning_rate: Path | None = None,
        events: Callable[[], Iterable[Happened]] | Path | None = None,
        has_layers: bool = True,
    ) -> None:
        """Prepare; nothing is read yet.

        Args:
            learning_rate: a file with the learning rate of steps.
            events: what `patchstore follow` did, or a file with its log.
            has_layers: whether headers of deltas are read too, which imports torch.
        """
        self.store, self._reader = store, Reader(store)
        self._learning_rate, self._events, self._has_layers = learning_rate, events, has_layers
        self._sampler: Sampler | None = None
        self._reading = threading.Lock()
        self._renewed: tuple[float, dict[str, Any]] | None = None

    def read(self) -> tuple[Recorded, list[Chart]]:
        """Read what is new, and return all there is to show.

        Raises:
            VersionNotFound, DataError, StoreUnavailable: the store holds no run, or cannot be read.
            UsageError: a file cannot be read, or has not what it should.
        """
        run = self._reader.read()
        rates = {} if self._learning_rate is None else learning_rates(self._learning_rate)
        charts = figures.of_run(run, rates)
        if self._has_layers and run.versions:
            from patchstore.ops.report.layers import Sampler

            self._sampler = self._sampler or Sampler(self.store)
            layers = self._sampler.read(run.header.schema, [each.manifest for each in run.versions])
            charts += [] if layers is None else [figures.of_layers(layers)]
        if self._events is None:
            return run, charts
        events = follow_log(self._events) if isinstance(self._events, Path) else [*self._events()]
        return run, charts + figures.of_log(run, events)

    def answer(self, path: str, query: str = "") -> "Answer":
        """Answer a browser that asks for one of `PATHS`.

        `/report.json` is what is new on the page that it has: without pictures, if `query` says that it has
        these. While another thread reads, the answer is what was read before.

        Raises:
            StoreUnavailable: another thread reads for the first time, and has not ended within seconds.
            PatchstoreError: as `read`.
        """
        script()
        # A store may not answer for minutes. Requests that all waited for it would leave no connection for
        # the health of the process.
        if self._reading.acquire(timeout=RENEW_S / 2 if self._renewed is None else 0):
            try:
                if self._renewed is None or time.monotonic() - self._renewed[0] > RENEW_S / 2:
                    content = contents(*self.read())
                    self._renewed = time.monotonic(), content
            finally:
                self._reading.release()
        if self._renewed is None:
            raise StoreUnavailable(f"{self.store.url} is being read for the first time; ask again")
        content = self._renewed[1]
        if path == PATHS[0]:
            return HTTPStatus.OK, page(content, is_live=True).encode(), "text/html; charset=utf-8"
        new = content if query != content["id"] else {name: content[name] for name in ("id", "summary")}
        return HTTPStatus.OK, json_line(new).encode(), "application/json"


@cache
def script() -> str:
    """Return plotly.js.

    Raises:
        UsageError: its package is not installed.
    """
    try:
        package = importlib.resources.files("plotly")
    except ModuleNotFoundError as exc:
        raise UsageError("a page of a run needs the package plotly: pip install plotly") from exc
    return package.joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")


def contents(run: Recorded, charts: Sequence[Chart]) -> dict[str, Any]:
    """Return what changes on a page while a run goes on, as JSON values."""
    drawn = [
        {"id": each.id, "html": _section(each), "height": each.height, "figure": each.figure}
        for each in charts
    ]
    table = _table(run)
    return {
        "title": f"run {escaped(run.header.run_id)[:80]}",
        "id": hashlib.sha256(json_line([drawn, table]).encode()).hexdigest(),
        "summary": _summary(run),
        "charts": drawn,
        "table": table,
    }


def page(content: Mapping[str, Any], *, is_live: bool = False) -> str:
    """Return the page. It is stored in UTF-8."""
    plotly, ours = script(), _asset("page.js")
    allowed = " ".join(f"'sha256-{_sha256(each)}'" for each in (plotly, ours))
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src '{'self' if is_live else 'none'}'; base-uri 'none'; form-action 'none'"
    )
    charts = content["charts"]
    drawn = {each["id"]: {"figure": each["figure"], "height": each["height"]} for each in charts}
    # No text ends the element that it is in, or begins another.
    data = json_line({"charts": drawn, "id": content["id"], "renew_s": RENEW_S if is_live else None}).replace(
        "<", "\\u003c"
    )
    sections = "".join(f'<section id="{each["id"]}">{each["html"]}</section>' for each in charts)
    links = "".join(f'<a href="#{each["id"]}">{each["id"]}</a>' for each in charts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{_text(content["title"])} - patchstore</title>
<style>{_asset("page.css")}</style>
</head>
<body>
<header id="summary">{content["summary"]}</header>
<nav aria-label="Pictures">{links}<a href="#versions">versions</a></nav>
<main>
<p>A picture that has the focus is moved by the arrow keys, zoomed by + and -, and whole again by 0.
<span id="renewed" role="status"></span></p>
<noscript><p>The pictures need JavaScript; their descriptions and the table do not.</p></noscript>
<div id="charts">{sections}</div>
<section id="versions"><details><summary>All versions in a table</summary>
{content["table"]}</details></section>
</main>
<script type="application/json" id="figures">{data}</script>
<script>{plotly}</script>
<script>{ours}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _text(value: object) -> str:
    """Return a value as HTML shows it: no markup, and no control characters."""
    return html.escape(escaped(str(value)))


def _section(chart: Chart) -> str:
    note = f"{chart.id}-says"
    return (
        f'<h2>{_text(chart.title)}</h2><p id="{note}">{_text(chart.says)}</p>'
        f'<div class="chart" id="{chart.id}-chart" tabindex="0" role="img" aria-describedby="{note}" '
        f'aria-label="{_text(chart.title)}" style="height:{chart.height}px"></div>'
    )


def _summary(run: Recorded) -> str:
    header, versions = run.header, run.versions
    schema = header.schema
    facts: list[tuple[str, str]] = [("store", run.url)]
    if header.adapter is not None:
        facts.append(("adapters", str(header.adapter)))
    size = f"{schema.num_elements:,} elements, {figures.in_bytes(schema.num_bytes)}"
    facts.append(("weights", f"{len(schema.tensors):,} tensors, {size}"))
    if versions:
        newest = versions[-1]
        left_out = f"; {run.num_left_out:,} older ones are not shown" if run.num_left_out else ""
        known = [share for each in versions if (share := figures.percent(each)) is not None]
        facts += [
            ("versions", f"{len(versions):,}{left_out}"),
            ("newest", _named(newest)),
            ("first shown", _named(versions[0])),
            (
                "median change",
                f"{statistics.median(known):.3g} % of elements" if known else "no version has a delta",
            ),
            ("uploaded", figures.saved(run)),
            ("resumed", f"{len(run.resumed):,}; went back {len(run.branched):,}"),
        ]
        tags = [f"{name} = {number}" for number, names in sorted(run.marks.tags.items()) for name in names]
        facts += [("tags", ", ".join(tags))] if tags else []
    else:
        facts.append(("versions", "none that can be read" if run.errors else "none yet"))
    rows = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in facts)
    wrong = [f"<li>{_text(str(each)[:500])}</li>" for each in run.errors[:_MOST_ERRORS]]
    more = f"<li>and {len(run.errors) - _MOST_ERRORS:,} more</li>" if len(run.errors) > _MOST_ERRORS else ""
    errors = (
        f'<div class="wrong"><h2>What could not be read</h2><ul>{"".join(wrong)}{more}</ul></div>'
        if wrong
        else ""
    )
    now = utc(time.time())
    return f"<h1>Run {_text(header.run_id[:80])}</h1><p>As of {now}.</p><dl>{rows}</dl>{errors}"


def _named(found: Version) -> str:
    return f"version {found.number}, step {found.step}, {found.manifest.created_at}"


_COLUMNS = (
    "version",
    "parent",
    "step",
    "changed",
    "%",
    "delta",
    "anchor",
    "encoding",
    "epoch",
    "created",
    "marks",
)


def _table(run: Recorded) -> str:
    """Return all versions, newest first: numbers as they are recorded, sizes in bytes."""
    rows = (_row(each) for each in reversed(run.versions))
    head = "".join(f'<th scope="col">{name}</th>' for name in _COLUMNS)
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _row(version: Version) -> str:
    found, share = version.manifest, figures.percent(version)
    delta, anchor = found.delta, found.anchor
    cells: Iterable[object] = (
        found.version,
        found.parent,
        found.step,
        delta and delta.num_changed,
        None if share is None else f"{share:.3g}",
        delta and delta.num_bytes,
        anchor.num_bytes if anchor is not None else "added" if version.has_anchor else None,
        delta and delta.encoding,
        found.writer.epoch,
        found.created_at,
        ", ".join(version.words),
    )
    # End tags of cells and rows may be left out, which is a fifth of a long table.
    return f"<tr>{''.join('<td>' if each is None else f'<td>{_text(each)}' for each in cells)}\n"


def one_page(report: Report) -> tuple[str, Recorded]:
    """Return a page as it is now, and what it shows.

    Raises:
        VersionNotFound: the store holds no run, or no version yet.
    """
    script()
    run, charts = report.read()
    if not run.versions and not run.errors:
        raise history.no_version(report.store)
    return page(contents(run, charts)), run
