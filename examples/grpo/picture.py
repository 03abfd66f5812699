"""The picture of a run: what each step earned, changed, sent and waited for."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Okabe and Ito's colours, which every kind of colour vision tells apart.
_BLUE, _ORANGE, _GREEN, _RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
_WINDOW = 5


@dataclass(slots=True, kw_only=True)
class Step:
    """What one step recorded."""

    step: int
    reward: float
    """Mean reward of the answers that it learnt from, 0 to 1."""
    right: float
    """Share of those answers that are right from end to end."""
    lag: float
    """Versions from the one that a server served when asked to the newest published: mean of groups."""
    max_lag: int
    answers_of: dict[str, int]
    """Number of answers that each server gave."""
    seconds: float
    density: float = 0.0
    """Changed elements of all elements; known once the version is committed."""
    num_bytes: int = 0
    """Of the version's delta."""


def smooth(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and up to `_WINDOW - 1` before it."""
    parts = [values[max(0, end - _WINDOW) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in parts]


def draw(steps: Sequence[Step], killed: int, returned: int, title: str, file: Path) -> None:
    """Write the picture as a PNG.

    Args:
        killed: the step at which a server was killed.
        returned: the first step after that learnt from its answers again.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    numbers = [step.step for step in steps]
    figure, axes = plt.subplots(4, 1, figsize=(8, 9), sharex=True, layout="constrained")
    panels: list[tuple[str, list[tuple[str, str, list[float]]]]] = [
        (
            "reward",
            [
                (_BLUE, "mean reward", smooth([step.reward for step in steps])),
                (_GREEN, "share of right answers", smooth([step.right for step in steps])),
            ],
        ),
        ("% of the weights", [(_ORANGE, "changed elements", [100 * step.density for step in steps])]),
        ("kB", [(_RED, "bytes of the version", [step.num_bytes / 1000 for step in steps])]),
        (
            "versions",
            [
                (_BLUE, "mean lag of the answers", [step.lag for step in steps]),
                (_ORANGE, "largest lag", [float(step.max_lag) for step in steps]),
            ],
        ),
    ]
    for axis, (unit, lines) in zip(axes, panels, strict=True):
        _panel(axis, numbers, unit, lines)
        axis.axvspan(killed, returned, color="0.85", label="one server killed and restarted")
        axis.legend(loc="best", fontsize=8, facecolor="white", edgecolor="none")
    axes[0].set_title(title, fontsize=10)
    axes[-1].set_xlabel("step")
    figure.savefig(file, dpi=140)
    plt.close(figure)


def _panel(axis: Any, numbers: list[int], unit: str, lines: list[tuple[str, str, list[float]]]) -> None:
    for colour, name, values in lines:
        axis.plot(numbers, values, color=colour, label=name, linewidth=1.5)
    axis.set_ylabel(unit)
    axis.set_ylim(bottom=0)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
