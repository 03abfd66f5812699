"""The pictures of a run, as plotly.js takes them: plain values for JSON, without colours of the page.

Texts from a bucket or a log are escaped here for plotly.js, which reads some HTML in what it shows.
"""

import html
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from patchstore.bucket import notes
from patchstore.ops.report.logs import Happened
from patchstore.ops.report.recorded import Recorded
from patchstore.read.versions import Version
from patchstore.support.printable import escaped

if TYPE_CHECKING:
    from patchstore.ops.report.layers import Layers

_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _GREY = (
    "#3b82c4",
    "#c8701a",
    "#2f9e64",
    "#c84b4b",
    "#8e6bbf",
    "#808080",
)
"""Legible on white and on black."""
_SERVERS = (_ORANGE, _GREEN, _PURPLE, _BLUE)
_DASHES = ("solid", "dot", "dash")
MOST_SERVERS = 20
"""Of a log: the others are counted."""
_MOST_LABEL = 28
"""Characters of a label at an axis; the whole text is shown where one points."""

Figure = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One picture of the page."""

    id: str
    title: str
    says: str
    """What it shows, in words: also for those who do not see it."""
    figure: Figure
    height: int = 320
    """Pixels."""


def shown(text: str) -> str:
    """Return a text from elsewhere as plotly.js shows it: no markup, and no control characters."""
    return html.escape(escaped(text[:500]), quote=False)


def percent(found: Version) -> float | None:
    """Return how many percent of all elements a version changed; None if it has no delta."""
    return None if found.share_changed is None else 100 * found.share_changed


def in_bytes(num: float) -> str:
    """Return a number of bytes with three digits, such as 16.4 GB."""
    units = ["bytes", "kB", "MB", "GB", "TB", "PB"]
    while num >= 999.5 and len(units) > 1:
        num, units = num / 1000, units[1:]
    return f"{num:.3g} {units[0]}"


def of_run(run: Recorded, rates: Mapping[int, float]) -> list[Chart]:
    """Return the pictures that need nothing but what is recorded of the versions."""
    if not run.versions:
        return []
    return [_shares(run, rates), _sizes(run), _commits(run), _records(run)]


def _trace(name: str, x: Sequence[Any], y: Sequence[Any], colour: str, **more: Any) -> Figure:
    """Return a line."""
    mode = more.pop("mode", "lines")
    line = {"color": colour, "width": 1.5, **more.pop("line", {})}
    return {"type": "scatter", "mode": mode, "name": name, "x": x, "y": y, "line": line, **more}


def _points(name: str, x: Sequence[Any], y: Sequence[Any], colour: str, **more: Any) -> Figure:
    marker = {"color": colour, "size": 8, "symbol": more.pop("symbol", "circle")}
    return {"type": "scatter", "mode": "markers", "name": name, "x": x, "y": y, "marker": marker, **more}


def _layout(x: str, y: str, **more: Any) -> Figure:
    return {
        "xaxis": {"title": {"text": x}, "automargin": True, **more.pop("xaxis", {})},
        "yaxis": {"title": {"text": y}, "automargin": True, **more.pop("yaxis", {})},
        **more,
    }


def _versions(numbers: Collection[int]) -> Figure:
    """Return an axis of versions. Of few of them plotly.js would show halves."""
    is_few = max(numbers, default=0) - min(numbers, default=0) < 10
    return {"tickformat": ",d", **({"tick0": 0, "dtick": 1} if is_few else {})}


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _at(found: Version) -> str:
    """Return when a version was created, as plotly.js reads times: all are UTC."""
    return found.manifest.created_at.removesuffix("Z")


def _shares(run: Recorded, rates: Mapping[int, float]) -> Chart:
    steps = [each.step for each in run.versions]
    shares = [_rounded(percent(each)) for each in run.versions]
    known = sorted(each for each in shares if each is not None)
    hover = "version %{x}, step %{customdata}: %{y} %<extra></extra>"
    numbers = [each.number for each in run.versions]
    # A version alone, between two without a delta, would be no line.
    mode = "lines+markers" if len(known) < 200 else "lines"
    found = [_trace("changed", numbers, shares, _BLUE, customdata=steps, hovertemplate=hover, mode=mode)]
    more: Figure = {}
    says = "No version of these has a delta."
    if known:
        says = (
            f"Changed elements by all elements: {known[0]:g} to {known[-1]:g} %, median "
            f"{statistics.median(known):.3g} %."
        )
    if rates:
        at = [(each.number, rates[each.step]) for each in run.versions if each.step in rates]
        says += f" The learning rate of {len(at):,} of {len(steps):,} versions is known by their step."
        x, y = [version for version, _ in at], [rate for _, rate in at]
        found.append(_trace("learning rate", x, y, _ORANGE, yaxis="y2", line={"dash": "dot"}))
        right = {
            "overlaying": "y",
            "side": "right",
            "showgrid": False,
            "automargin": True,
            "rangemode": "tozero",
            "tickmode": "auto",
        }
        more["yaxis2"] = {"title": {"text": "learning rate"}, "exponentformat": "e", **right}
    return Chart(
        id="share",
        title="Share of elements that a version changed",
        says=says,
        figure={
            "data": found,
            "layout": _layout(
                "version", "% of elements", xaxis=_versions(numbers), yaxis={"rangemode": "tozero"}, **more
            ),
        },
    )


def _sizes(run: Recorded) -> Chart:
    deltas = [(each.number, each.manifest.delta) for each in run.versions if each.manifest.delta is not None]
    anchors = [
        (each.number, each.manifest.anchor) for each in run.versions if each.manifest.anchor is not None
    ]
    full = run.header.schema.num_bytes
    first, last = run.versions[0].number, run.versions[-1].number
    added = [each.number for each in run.versions if run.marks.has_added_anchor(each.number)]
    hover = "version %{x}: %{y:,d} bytes<extra></extra>"
    # A delta without changes has no bytes, and a logarithm none either.
    sizes = [delta.num_bytes or None for _, delta in deltas]
    mode = "lines+markers" if len(deltas) < 200 else "lines"
    found = [
        _trace("delta", [number for number, _ in deltas], sizes, _BLUE, hovertemplate=hover, mode=mode),
        _points(
            "anchor",
            [number for number, _ in anchors],
            [anchor.num_bytes for _, anchor in anchors],
            _GREEN,
            symbol="diamond",
            hovertemplate=hover,
        ),
        _trace(
            "full checkpoint", [first, last], [full, full], _GREY, line={"dash": "dash"}, hovertemplate=hover
        ),
    ]
    if added:
        at = [full] * len(added)
        found.append(_points("added anchor", added, at, _PURPLE, symbol="diamond-open", hoverinfo="x+name"))
    return Chart(
        id="bytes",
        title="Bytes of each version",
        says=f"{saved(run)} The dashed line is a full checkpoint: {full:,} bytes of weights.",
        figure={
            "data": found,
            "layout": _layout(
                "version",
                "bytes",
                xaxis=_versions([each.number for each in run.versions]),
                yaxis={"type": "log", "exponentformat": "SI", "dtick": 1},
            ),
        },
    )


def saved(run: Recorded) -> str:
    """Return what the publisher uploaded, and how much less that is than full checkpoints, in a sentence."""
    uploaded = sum(each.num_bytes for each in run.versions)
    full = run.header.schema.num_bytes * len(run.versions)
    factor = f", {full / uploaded:.1f} times as much" if 0 < uploaded < full else ""
    return (
        f"Publishers uploaded {in_bytes(uploaded)} for these {len(run.versions):,} versions; "
        f"full checkpoints would be {in_bytes(full)}{factor}."
    )


def _commits(run: Recorded) -> Chart:
    versions = run.versions
    hover = "version %{y}, %{x}<extra></extra>"
    found = [
        _trace(
            "commit",
            [_at(each) for each in versions],
            [each.number for each in versions],
            _BLUE,
            line={"shape": "hv"},
            hovertemplate=hover,
        )
    ]
    if run.resumed:
        writers = [each.manifest.writer for each in run.resumed]
        texts = [f"publisher {shown(each.id)}, epoch {each.epoch}" for each in writers]
        x, y = [_at(each) for each in run.resumed], [each.number for each in run.resumed]
        more = {"symbol": "triangle-up", "text": texts, "hovertemplate": "resumed with version %{y}: %{text}"}
        found.append(_points("resumed", x, y, _GREEN, **more))
    if run.branched:
        created = {each.number: _at(each) for each in versions}
        went: list[tuple[str | None, int | None]] = []
        for each in run.branched:
            if (parent := each.manifest.parent) in created:
                went += [(created[parent], parent), (_at(each), each.number), (None, None)]
        hover = "version %{y}: the trainer went back to a parent that is not the version before"
        look: Figure = {"mode": "lines+markers", "line": {"dash": "dot"}}
        text = f"{hover}<extra></extra>"
        at, numbers = [at for at, _ in went], [version for _, version in went]
        found.append(_trace("went back", at, numbers, _RED, hovertemplate=text, **look))
    axis = _versions([each.number for each in versions])
    return Chart(
        id="commits",
        title="Commits over time",
        says=f"{_num(len(run.resumed), 'resume')} and {_num(len(run.branched), 'branch', 'branches')}. "
        "Times are UTC, by the trainer's clock.",
        figure={"data": found, "layout": _layout("", "version", xaxis={"type": "date"}, yaxis=axis)},
    )


def _num(num: int, what: str, many: str | None = None) -> str:
    return f"{num:,} {what if num == 1 else many or f'{what}s'}"


def _records(run: Recorded) -> Chart:
    first = run.versions[0].number
    resumed, branched = ([each.number for each in some] for some in (run.resumed, run.branched))
    retired = [each.number for each in run.versions if each.is_retired]
    signed = [each.number for each in run.versions if each.signed_by]
    anchors = [each.number for each in run.versions if each.manifest.anchor is not None]
    added = [each.number for each in run.versions if run.marks.has_added_anchor(each.number)]
    found = [
        *_spans("retired", retired, _GREY),
        *_spans("signed", signed, _GREEN),
        *([_points("went back", branched, ["went back"] * len(branched), _RED)] if branched else []),
        *([_points("resumed", resumed, ["resumed"] * len(resumed), _GREEN)] if resumed else []),
    ]
    rollups: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for ends in run.marks.shortcuts:
        if ends.parent is not None and ends.version >= first:
            rollups[(ends.version - ends.parent - 1).bit_length()].append((ends.parent, ends.version))
    for power, ways in sorted(rollups.items(), reverse=True):
        low, high = 2**power // 2 + 1, 2**power
        found += [
            _segments(f"rollup of {low} to {high}" if low < high else f"rollup of {high}", ways, _PURPLE)
        ]
    found += [_points("added anchor", added, ["added anchor"] * len(added), _PURPLE)] if added else []
    found += [_points("anchor", anchors, ["anchor"] * len(anchors), _BLUE)] if anchors else []
    tags = [(each.number, name) for each in run.versions for name in each.tags or ()]
    if tags:
        x, texts = [version for version, _ in tags], [shown(name) for _, name in tags]
        more = {"text": texts, "hovertemplate": "%{text}: version %{x}<extra></extra>", "symbol": "star"}
        more |= {"mode": "markers+text", "textposition": "top center"} if len(tags) <= 12 else {}
        found.append(_points("tag", x, ["tag"] * len(x), _ORANGE, **more))
    rows = {each["name"] for each in found}
    return Chart(
        id="records",
        title="Tags, anchors, rollups, signatures and retired versions",
        says=f"{_num(len(tags), 'tag')}, {_num(len(anchors), 'anchor')} of publishers, "
        f"{_num(len(added), 'added anchor')}, {_num(sum(map(len, rollups.values())), 'rollup')}, "
        f"{_num(len(signed), 'signed version')}, {_num(len(retired), 'retired version')}. "
        "Signatures were not verified here.",
        figure={
            "data": found,
            "layout": _layout(
                "version",
                "",
                xaxis=_versions([each.number for each in run.versions]),
                yaxis={"type": "category"},
                showlegend=False,
            ),
        },
        height=140 + 30 * len(rows),
    )


def _spans(name: str, versions: Iterable[int], colour: str) -> list[Figure]:
    """Return versions that follow each other as lines: there may be thousands."""
    found = notes.ranges(versions)
    return [_segments(name, found, colour)] if found else []


def _segments(name: str, ways: Sequence[tuple[int, int]], colour: str) -> Figure:
    x = [at for way in sorted(ways) for at in (*way, None)]
    y = [each for _ in ways for each in (name, name, None)]
    more = {"mode": "lines+markers", "line": {"width": 3}, "marker": {"size": 5}}
    return _trace(name, x, y, colour, hovertemplate=f"{name}: %{{x}}<extra></extra>", **more)


def of_layers(layers: "Layers") -> Chart:
    """Return the heat map of layers by versions."""
    labels = [_short(name) for name in layers.names]
    shares = [
        [None if share != share else _rounded(100 * share) for share in row]  # noqa: PLR0124  (NaN)
        for row in layers.shares.tolist()
    ]
    names = [[shown(name)] * len(layers.versions) for name in layers.names]
    how = (
        "Of what context codes, headers have bytes alone, by which changes are distributed: cells are "
        "estimates."
        if layers.is_estimated
        else "Elements that gap states to bridge long gaps count too."
    )
    return Chart(
        id="layers",
        title="Changes by layer",
        says=f"Changed elements of each layer in {len(layers.versions):,} of {layers.num_versions:,} "
        f"versions, from the headers of their deltas. {how} An empty column is of a version that has no "
        "delta, or whose delta is not stored any more.",
        figure={
            "data": [
                {
                    "type": "heatmap",
                    "x": [*layers.versions],
                    "y": [*range(len(labels))],
                    "z": shares,
                    "text": names,
                    "hovertemplate": "%{text}<br>version %{x}: %{z} %<extra></extra>",
                    "colorscale": "Viridis",
                    "zmin": 0,
                    "colorbar": {"title": {"text": "%"}, "thickness": 12},
                }
            ],
            "layout": _layout(
                "version",
                "",
                xaxis=_versions(layers.versions),
                yaxis={"tickvals": [*range(len(labels))], "ticktext": labels, "autorange": "reversed"},
            ),
        },
        height=120 + max(160, 15 * len(labels)),
    )


def _short(name: str) -> str:
    kept = name if len(name) <= _MOST_LABEL else f"…{name[1 - _MOST_LABEL :]}"
    return shown(kept)


def of_log(run: Recorded, events: Sequence[Happened]) -> list[Chart]:
    """Return what servers served over time, and how long updates took."""
    by_server: dict[str, list[Happened]] = defaultdict(list)
    for event in events:
        if event.server is not None:
            by_server[event.server].append(event)
    if not by_server:
        return []
    servers = sorted(by_server)[:MOST_SERVERS]
    begin, end = min(each.at for each in events), max(each.at for each in events)
    heads = [*[each for each in run.versions if _at(each) <= begin][-1:]]
    heads += [each for each in run.versions if begin < _at(each) <= end]
    x, y = [max(_at(each), begin) for each in heads], [each.number for each in heads]
    line: Figure = {"shape": "hv", "width": 3}
    staircase = [_trace("newest", [*x, end], [*y, *y[-1:]], _GREY, line=line)]
    failures: list[tuple[Happened, int]] = []
    updates: list[Happened] = []
    for number, server in enumerate(servers):
        serving, points = None, list[tuple[str, int]]()
        for each in by_server[server]:
            if each.outcome == "failed":
                # Where the server was, if it is not known where it was to go.
                failures.append((each, (serving or 0) if each.version is None else each.version))
            elif each.version is not None:
                serving = each.version
                points.append((each.at, serving))
            if each.stage_s is not None:
                updates.append(each)
        if serving is not None:
            points.append((end, serving))
        colour, dash = _SERVERS[number % len(_SERVERS)], _DASHES[number // len(_SERVERS) % len(_DASHES)]
        x, y = [at for at, _ in points], [version for _, version in points]
        staircase.append(_trace(_short(server), x, y, colour, line={"shape": "hv", "dash": dash}))
    if failures:
        x, y = [each.at for each, _ in failures], [version for _, version in failures]
        texts = [f"{shown(each.server or '')}: {shown(each.kind or 'failed')}" for each, _ in failures]
        more = {"text": texts, "hovertemplate": "%{text}<extra></extra>", "symbol": "x"}
        staircase.append(_points("failed", x, y, _RED, **more))
    seen = [version for line in staircase for version in line["y"]]
    others = len(by_server) - len(servers)
    more_servers = f", and {others:,} more that are not shown" if others else ""
    charts = [
        Chart(
            id="served",
            title="Versions that servers served, and the newest one",
            says=f"{_num(len(servers), 'server')}{more_servers}, {_num(len(failures), 'failed step')}. A "
            "line below the grey one is a server behind the newest version.",
            figure={
                "data": staircase,
                "layout": _layout("", "version", xaxis={"type": "date"}, yaxis=_versions(seen)),
            },
        )
    ]
    if updates:
        charts.append(_updates(updates))
    return charts


def _updates(updates: Sequence[Happened]) -> Chart:
    x = [each.at for each in updates]
    texts = [f"{shown(each.server or '')}, version {each.version}" for each in updates]
    # A logarithm of nothing is nothing.
    staged, paused = [each.stage_s or None for each in updates], [each.pause_s or None for each in updates]
    more = {"text": texts, "hovertemplate": "%{text}: %{y:.3g} s"}
    pauses = [each for each in paused if each is not None]
    half = (
        f" The median pause is {statistics.median(pauses):.3g} s, the longest {max(pauses):.3g} s."
        if pauses
        else ""
    )
    return Chart(
        id="updates",
        title="Staging and pauses of updates",
        says=f"{_num(len(updates), 'update')}.{half} A server generates while it stages a version, and "
        "pauses, if at all, while the version is applied.",
        figure={
            "data": [
                _points("staged", x, staged, _BLUE, **more),
                _points("paused", x, paused, _RED, symbol="x", **more),
            ],
            "layout": _layout("", "seconds", xaxis={"type": "date"}, yaxis={"type": "log", "dtick": 1}),
        },
    )
