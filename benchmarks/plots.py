"""`python -m benchmarks.plots RESULTS.jsonl... --out DIR`: draw recorded results.

A picture shows the rows that a case printed with `--json`. Pictures without rows are not drawn.
Needs matplotlib: `pip install -e '.[bench]'`.
"""

import argparse
import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving.updates import PARTS
from benchmarks.support.kernel_bench import MEASURES

Row = Mapping[str, Any]

# Okabe and Ito's colours, which every kind of colour vision tells apart.
_BLUE, _ORANGE, _GREEN, _RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
_SKY, _PINK, _YELLOW, _GREY = "#56B4E9", "#CC79A7", "#F0E442", "#8A8A8A"

_WAYS = {
    "patchstore": (_BLUE, "patchstore, from the store"),
    "patchstore-decoded": (_SKY, "patchstore, decoded patches"),
    "vllm-patch": (_RED, "vLLM's patch loader"),
    "vllm-patch-unchecked": (_ORANGE, "the same, positions unchecked"),
    "dense": (_GREY, "dense load_weights"),
}
_PARTS = {
    "compare_s": (_BLUE, "compare"),
    "store_s": (_SKY, "encode, upload, commit"),
    "notice_s": (_GREY, "notice"),
    "prefetch_s": (_GREEN, "fetch, decode, stage"),
    "prove_s": (_YELLOW, "prove"),
    "pause_s": (_RED, "pause"),
    "end_s": ("black", "end"),
    "answer_s": (_PINK, "first answer"),
}
assert _PARTS.keys() == PARTS.keys()
_ROLES = {
    "ours": (_BLUE, "patchstore"),
    "peer": (_ORANGE, "plain torch"),
    "floor": (_GREY, "floor: the same bytes read or copied"),
}

_GROWING = {"publish": "-", "update": "--"}
"""What grows with the number of tensors, and its line."""
_ENCODINGS = {"gap": _BLUE, "context": _ORANGE}
_NATIVE = {
    "patchstore": (_BLUE, "patchstore, through a folder"),
    "sparse_nccl": (_ORANGE, "vLLM sparse_nccl, changes known before"),
    "nccl": (_GREY, "vLLM nccl, all weights"),
    "ipc": (_GREEN, "vLLM ipc, all weights"),
}

_DOTS_PER_INCH = 160
_WIDTH = 8.0


def read(paths: Iterable[Path]) -> list[Row]:
    """Read the rows of files, in their order."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines() if line]


def draw(rows: Sequence[Row], out: Path) -> list[Path]:
    """Draw every picture that has rows, and return the files.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    out.mkdir(parents=True, exist_ok=True)
    drawn = []
    if found := [row for row in rows if row["case"] == "apply" and "way" in row]:
        drawn.append(_save(pause(found), out / "pause.png"))
    served = [row for row in rows if row["case"] == "serving"]
    if found := [row for row in served if row["row"] == "path"]:
        drawn.append(_save(breakdown(found), out / "publish-to-serving.png"))
    for at, (where, group) in enumerate(
        _by_place(row for row in served if row["row"] == "series" and row["points"]).items()
    ):
        name = f"latency-{where[0]}{f'-{at}' if at else ''}.png"
        drawn.append(_save(token_gaps(group), out / name))
    timed = [row for row in rows if row["case"] == "kernels" and "measure" in row]
    for at, (where, group) in enumerate(_by_place(timed).items()):
        if any(row["beside"] for row in group):
            name = f"kernels-{where[0]}{f'-{at}' if at else ''}.png"
            drawn.append(_save(beside(group), out / name))
    if found := [row for row in rows if row["case"] == "growth"]:
        drawn.append(_save(growth(found), out / "growth.png"))
    if found := [row for row in rows if row["case"] == "native" and row["row"] == "way"]:
        drawn.append(_save(native(found), out / "native.png"))
    return drawn


def pause(rows: Sequence[Row]) -> Any:
    """Draw how long generation waits as bars, by way and density, in one panel per shape and device."""
    places = _by_place(rows)
    figure = _figure(2.4 * len(places) + 0.6)
    ways = [way for way in _WAYS if any(row["way"] == way for row in rows)]
    longest_ms = 1000 * max(row["pause_s"] for row in rows)
    # matplotlib draws no bar that begins above its end.
    least_ms = min(1.0, 500 * min(row["pause_s"] for row in rows))
    for axes, ((shape, device), group) in zip(_panels(figure, len(places)), places.items(), strict=True):
        densities = sorted({row["density"] for row in group})
        here = [way for way in ways if any(row["way"] == way for row in group)]
        width = 0.8 / len(here)
        for at, way in enumerate(here):
            found = {row["density"]: 1000 * row["pause_s"] for row in group if row["way"] == way}
            xs = [i + (at - (len(here) - 1) / 2) * width for i, each in enumerate(densities) if each in found]
            heights = [found[each] for each in densities if each in found]
            bars = axes.bar(xs, heights, width * 0.92, color=_WAYS[way][0])
            axes.bar_label(
                bars,
                labels=[f"{each:.{2 - (each >= 1) - (each >= 10)}f}" for each in heights],
                fontsize=8,
                padding=1,
            )
        # All panels have one scale, so that their bars can be compared.
        _logarithmic(axes, least_ms, 2 * longest_ms)
        axes.set_xticks(range(len(densities)), [f"{_percent(each)} changed" for each in densities])
        axes.set_ylabel("pause, ms", fontsize=8)
        axes.set_title(f"{shape} on {device}", fontsize=9, loc="left")
    _legend(figure, {_WAYS[way][1]: _WAYS[way][0] for way in ways}, 3)
    return figure


def breakdown(rows: Sequence[Row]) -> Any:
    """Draw the medians of the parts from the optimiser to an answer as stacked bars."""
    places = _by_place(rows)
    figure = _figure(0.9 + sum(0.5 + 0.34 * len(group) for group in places.values()))
    heights = [len(group) for group in places.values()]
    panels = _panels(figure, len(places), heights)
    for axes, ((shape, device), group) in zip(panels, places.items(), strict=True):
        bars = sorted(group, key=lambda row: (row["concurrency"], row["density"]), reverse=True)
        left = [0.0] * len(bars)
        for part, (colour, _) in _PARTS.items():
            lengths = [row[part] for row in bars]
            axes.barh(range(len(bars)), lengths, 0.72, left=left, color=colour)
            left = [begin + length for begin, length in zip(left, lengths, strict=True)]
        for at, (row, end) in enumerate(zip(bars, left, strict=True)):
            said = f" {row['total_s']:.2f} s, pause {1000 * row['pause_s']:.0f} ms"
            axes.text(end, at, said, va="center", fontsize=8)
        axes.set_xlim(0, max(left) * 1.3)
        axes.set_yticks(range(len(bars)), [_load(row) for row in bars])
        axes.set_title(f"{shape} on {device}", fontsize=9, loc="left")
    panels[-1].set_xlabel("seconds after publish_patch was called", fontsize=8)
    _legend(figure, {label: colour for colour, label in _PARTS.values()}, 4)
    return figure


def token_gaps(rows: Sequence[Row]) -> Any:
    """Draw the time between tokens around one update, in one panel per density and kind of load."""
    rows = sorted(rows, key=lambda row: (row["density"], row["concurrency"]))
    heights_ms = [1000 * seconds for row in rows for _, seconds in row["points"]]
    shortest_ms, longest_ms = min(heights_ms), max(heights_ms)
    figure = _figure(0.8 + 1.5 * len(rows))
    panels = _panels(figure, len(rows), share=True)
    stretches = (
        ("called", "noticed", _SKY, "publishing"),
        ("noticed", "pausing", _GREEN, "staging"),
        ("pausing", "resumed", _RED, "pause"),
    )
    for axes, row in zip(panels, rows, strict=True):
        marks = row["marks"]
        for began, ended, colour, _ in stretches:
            axes.axvspan(marks[began], marks[ended], color=colour, alpha=0.22, linewidth=0)
        xs, ys = zip(*row["points"], strict=True)
        axes.plot(xs, [1000 * y for y in ys], ".", color="black", markersize=2.5)
        _logarithmic(axes, 0.5 * shortest_ms, 2 * longest_ms)
        axes.set_ylabel("ms", fontsize=8)
        said = f"{_load(row)}: stall {1000 * row['stall_s']:.0f} ms"
        axes.set_title(said, fontsize=8, loc="left")
    figure.suptitle(
        f"Time between tokens, {rows[0]['shape']} on {rows[0]['device']}",
        fontsize=9,
    )
    panels[-1].set_xlabel("seconds from the pause", fontsize=8)
    _legend(figure, {label: colour for _, _, colour, label in stretches}, 3, alpha=0.35)
    return figure


def beside(rows: Sequence[Row]) -> Any:
    """Draw the kernel times of one shape as bars, each above its floor or peer, in one panel per part."""
    found = {(row["part"], row["measure"], row["density"]): row for row in rows}
    parts = [part for part in MEASURES if any(row["part"] == part and row["beside"] for row in rows)]
    groups = [[row for row in rows if row["part"] == part and row["beside"]] for part in parts]
    for group in groups:
        order = list(MEASURES[group[0]["part"]])
        group.sort(key=lambda row: (order.index(row["measure"]), row["density"] or 0.0), reverse=True)
    figure = _figure(1.2 + sum(0.4 + 0.32 * len(group) for group in groups))
    panels = _panels(figure, len(parts), [len(group) for group in groups])
    for axes, part, group in zip(panels, parts, groups, strict=True):
        for at, row in enumerate(group):
            key = part, row["beside"]
            other = found.get((*key, row["density"])) or found[(*key, None)]
            for place, bar in ((at + 0.2, row), (at - 0.2, other)):
                colour, _ = _ROLES[MEASURES[part][bar["measure"]].role]
                axes.barh(place, bar["ms"], 0.36, color=colour)
            said = f" {row['ms']:.3g} ms, {row['ratio']:.2g} times {row['beside']}"
            axes.text(max(row["ms"], other["ms"]), at, said, va="center", fontsize=7)
        axes.set_xscale("log")
        # Room for the text beside the bars.
        axes.set_xlim(right=axes.get_xlim()[1] * 20)
        ticker = importlib.import_module("matplotlib.ticker")
        axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
        names = [
            row["measure"] + (f", {_percent(row['density'])}" if row["density"] else "") for row in group
        ]
        axes.set_yticks(range(len(group)), names)
        axes.set_title(f"{part}, {group[0]['shape']} on {group[0]['device']}", fontsize=9, loc="left")
    panels[-1].set_xlabel("ms", fontsize=8)
    _legend(figure, {label: colour for colour, label in _ROLES.values()}, 3)
    return figure


def growth(rows: Sequence[Row]) -> Any:
    """Draw the host's time for one version by the number of tensors, in one panel per device.

    Where rows are of several commits, the last row of each encoding and number counts.
    """
    devices = sorted({row["device"] for row in rows})
    figure = _figure(0.8 + 2.8 * len(devices))
    panels = _panels(figure, len(devices), share=True)
    ticker = importlib.import_module("matplotlib.ticker")
    for axes, device in zip(panels, devices, strict=True):
        for encoding, colour in _ENCODINGS.items():
            newest = {
                row["tensors"]: row for row in rows if (row["device"], row["encoding"]) == (device, encoding)
            }
            for what, line in _GROWING.items():
                if newest:
                    xs = sorted(newest)
                    ys = [newest[x][f"{what}_host_s"] for x in xs]
                    axes.plot(
                        xs, ys, line, marker="o", markersize=4, color=colour, label=f"{what}, {encoding}"
                    )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(sorted({row["tensors"] for row in rows}))
        for each in (axes.xaxis, axes.yaxis):
            each.set_minor_formatter(ticker.NullFormatter())
        axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
        axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axes.set_ylabel("CPU seconds of a version", fontsize=8)
        axes.set_title(f"on {device}", fontsize=9, loc="left")
        axes.legend(fontsize=8, frameon=False)
    panels[-1].set_xlabel("tensors", fontsize=8)
    return figure


def native(rows: Sequence[Row]) -> Any:
    """Draw the pause (dark) and the time to an answer of each way, in one panel per shape and device."""
    places = _by_place(rows)
    figure = _figure(0.9 + sum(0.5 + 0.3 * len(group) for group in places.values()))
    panels = _panels(figure, len(places), [len(group) for group in places.values()], share=True)
    for axes, ((shape, device), group) in zip(panels, places.items(), strict=True):
        order = list(_NATIVE)
        bars = sorted(group, key=lambda row: (row["density"], order.index(row["way"])), reverse=True)
        for at, row in enumerate(bars):
            colour, _ = _NATIVE[row["way"]]
            axes.barh(at, row["answer_s"], 0.72, color=colour, alpha=0.35)
            axes.barh(at, row["pause_s"], 0.72, color=colour)
            said = f" pause {1000 * row['pause_s']:,.0f} ms, answer after {1000 * row['answer_s']:,.0f} ms"
            axes.text(row["answer_s"], at, said, va="center", fontsize=8)
        axes.set_yticks(range(len(bars)), [f"{_percent(row['density'])} changed" for row in bars])
        axes.set_title(f"{shape} on {device}", fontsize=9, loc="left")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(importlib.import_module("matplotlib.ticker").FormatStrFormatter("%g"))
    shortest, longest = min(row["pause_s"] for row in rows), max(row["answer_s"] for row in rows)
    # Bars of a logarithmic axis need a beginning, and the text room beside them.
    panels[0].set_xlim(shortest / 2, longest * (longest / shortest) ** 0.6)
    panels[-1].set_xlabel("seconds", fontsize=8)
    ways = [way for way in _NATIVE if any(row["way"] == way for row in rows)]
    _legend(figure, {_NATIVE[way][1]: _NATIVE[way][0] for way in ways}, 2)
    return figure


def _load(row: Row) -> str:
    streams = f"{row['concurrency']} streams" if row["concurrency"] else "idle"
    cache = row.get("prefix_cache", "reset")
    return f"{_percent(row['density'])}, {streams}" + ("" if cache == "reset" else f", prefixes: {cache}")


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


def _by_place(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """Group rows by shape and device."""
    places: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        places.setdefault((row["shape"], row["device"]), []).append(row)
    return places


def _figure(height: float) -> Any:
    try:
        # `pyplot` would look for a screen.
        module = importlib.import_module("matplotlib.figure")
    except ImportError as exc:
        raise SystemExit(f"pictures need matplotlib ({exc}): pip install -e '.[bench]'") from exc
    return module.Figure(figsize=(_WIDTH, height), layout="constrained")


def _panels(figure: Any, count: int, heights: Sequence[float] | None = None, *, share: bool = False) -> Any:
    """Return axes below each other, without their top and right frames. `share`: they have one scale."""
    grid = figure.subplots(
        *(count, 1), squeeze=False, sharex=share, sharey=share and not heights, height_ratios=heights
    )
    for axes in grid[:, 0]:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    return grid[:, 0]


def _logarithmic(axes: Any, bottom: float, top: float) -> None:
    axes.set_yscale("log")
    axes.set_ylim(bottom, top)
    ticker = importlib.import_module("matplotlib.ticker")
    axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())


def _legend(figure: Any, labels: Mapping[str, str], columns: int, *, alpha: float = 1.0) -> None:
    patch = importlib.import_module("matplotlib.patches").Patch
    handles = [patch(color=colour, label=label, alpha=alpha, linewidth=0) for label, colour in labels.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=_DOTS_PER_INCH)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="files of JSON lines")
    parser.add_argument("--out", type=Path, required=True, help="folder of the pictures")
    args = parser.parse_args()
    drawn = draw(read(args.results), args.out)
    if not drawn:
        raise SystemExit(
            "none of these rows is drawn: results of `apply`, `growth`, `kernels`, `native` and `serving` are"
        )
    print(*drawn, sep="\n")


if __name__ == "__main__":
    main()
