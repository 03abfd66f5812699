"""Time the kernels of a publication and of an update alone, each beside a floor or plain torch.

There is no store, server or transport: weights and changes are random, on one GPU. A floor is the time of
the memory or the bus for the same bytes, measured in the same run and not taken from a data sheet.

Before a shape's first figure, the results of the kernels are compared with those of plain torch; a
difference ends the run.
"""

import argparse
import gc
from collections.abc import Iterator

from benchmarks.kernels.engine import MIN_DENSITY, engine
from benchmarks.kernels.publisher import publisher
from benchmarks.support.kernel_bench import Bench, Row, Short, device
from benchmarks.support.shapes import SHAPES

PARTS = ["publisher", "engine"]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape", choices=list(SHAPES), nargs="+", default=["qwen3-8b"], help="of the models"
    )
    parser.add_argument(
        "--densities",
        type=float,
        nargs="+",
        default=[0.003, 0.01, 0.03],
        help="share of elements that a version changes",
    )
    parser.add_argument("--repeats", type=int, default=7, help="timed calls of each; interpreted: 1")
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=PARTS, help="`engine` needs vLLM")
    parser.add_argument("--host-gib", type=float, default=8.0, help="of the snapshot in host memory, at most")


def run(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row about each shape, then one per measure and density."""
    where = device()
    if any(not MIN_DENSITY <= density <= 0.5 for density in args.densities):
        raise SystemExit(f"densities must be from {MIN_DENSITY} to 0.5")
    for name in args.shape:
        bench = Bench(SHAPES[name], where, args.repeats)
        yield bench.about()
        for part in args.parts:
            bench.part = part
            try:
                if part == "publisher":
                    yield from publisher(bench, args.densities, int(args.host_gib * 2**30))
                else:
                    yield from engine(bench, args.densities)
            except Short as exc:
                yield bench.skipped(str(exc))
            gc.collect()
