"""Let the ranks of one vLLM engine agree whether a step succeeded, and fail as one.

vLLM reads the workers' replies in rank order and stops at the first failure. The replies of later
ranks then stay in their queues, and every later call gets the answer to an earlier one. So a rank
never raises on its own: all learn what happened to each, and only the last one raises.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from patchstore.errors import HalfApplied, HostError, InternalError, PatchstoreError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What went wrong in one rank, in a form that crosses processes."""

    rank: int
    kind: str
    """The `kind` of a `PatchstoreError`, `os` where the system refused, else `internal`."""
    message: str

    @classmethod
    def of(cls, rank: int, exc: Exception) -> "Failure":
        if isinstance(exc, PatchstoreError):
            return cls(rank=rank, kind=exc.kind, message=str(exc))
        if isinstance(exc, OSError):
            return cls(rank=rank, kind=HostError.kind, message=str(exc))
        return cls(rank=rank, kind=InternalError.kind, message=f"{type(exc).__name__}: {exc}")


class RanksFailed(Exception):
    """A step failed in some ranks; raised in all of them alike."""

    def __init__(self, failures: list[Failure]) -> None:
        super().__init__(describe(failures))
        self.failures = failures


def gather(groups: Sequence[dist.ProcessGroup], value: T) -> list[T]:
    """Return the values of all ranks, the same list in each of them.

    Args:
        groups: CPU groups that together span the engine's ranks, such as tensor then pipeline
            parallel; every rank must call with its own. Without groups there is one rank.
    """
    values = [value]
    for group in groups:
        parts: list[list[T]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(parts, values, group=group)
        values = [each for part in parts for each in part]
    return values


def is_last(groups: Sequence[dist.ProcessGroup]) -> bool:
    """Whether this is the rank whose reply vLLM reads last."""
    return all(dist.get_rank(group) == dist.get_world_size(group) - 1 for group in groups)


def describe(failures: Sequence[Failure]) -> str:
    """Say `[kind] message` for all ranks, once for each distinct reason and the worst kind first."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for failure in failures:
        ranks.setdefault((failure.kind, failure.message), []).append(failure.rank)
    ordered = sorted(ranks, key=lambda reason: reason[0] != HalfApplied.kind)
    if len(ordered) == 1:
        kind, message = ordered[0]
        return f"[{kind}] {message}"
    return "; ".join(
        f"[{kind}] rank {', '.join(map(str, ranks[kind, message]))}: {message}" for kind, message in ordered
    )
