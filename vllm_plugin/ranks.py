"""Let the ranks of one vLLM engine agree whether a step succeeded, and fail as one.

A rank never raises on its own: all learn what happened to each. Where each rank has a caller of its own, as
under torchrun, all raise. Where vLLM reads the workers' replies in rank order, it stops at the first failure.
The replies of later ranks then stay in their queues, and every later call gets the answer to an earlier one.
So there only the last rank raises.
"""

import logging
import pickle  # nosec B403 # between ranks of one engine
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from patchstore.errors import HalfApplied, HostError, InternalError, PatchstoreError, RankLost

T = TypeVar("T")

# vLLM configures only loggers below its own name.
logger = logging.getLogger("vllm.patchstore")

_TAG = 0x7073
"""Of messages between two ranks; vLLM's own have tag 0."""


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


class RanksLost(RanksFailed):
    """Some ranks ended or did not answer. Raised in every rank that asked them, from then on at once."""


class Ranks:
    """What one rank says to the others, and hears of them."""

    def __init__(
        self, rank: int, groups: Callable[[], Sequence[dist.ProcessGroup]], *, is_read_in_order: bool
    ) -> None:
        """Say nothing yet. `groups` are CPU groups that together span the engine's ranks, such as tensor then
        pipeline parallel; each rank has its own. `is_read_in_order`: one process reads all replies, and stops
        at a failure.
        """
        self._rank = rank
        self._groups = groups
        self.is_read_in_order = is_read_in_order
        self._lost: set[int] = set()
        """Ranks of torch.distributed that ended or did not answer."""

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, the same list in each of them.

        Raises RanksLost if a rank ended, or did not call within the groups' timeout. The ranks' connections
        are closed then, so that none waits for another: all that call later raise too.
        """
        self.check()
        values, lost = [value], set[int]()
        for group in self._groups():
            heard, silent = _exchange(group, (values, lost))
            values = [each for part, _ in heard for each in part]
            # Who is silent when somebody is lost already may only have waited for that one, as this rank did.
            lost = lost.union(*(missed for _, missed in heard)) or silent
        if lost:
            self._lost = lost
            for group in self._groups():
                _leave(group)
            self.check()
        return values

    def check(self) -> None:
        """Raise RanksLost if a rank was lost before."""
        if self._lost:
            numbers = ", ".join(map(str, sorted(self._lost)))
            message = (
                f"rank {numbers} of torch.distributed ended, or did not answer within vLLM's "
                "cpu_distributed_timeout_seconds (1800 if it is not set), so the ranks cannot agree on a "
                "version any more: end all of them, and start the server or the job again"
            )
            raise RanksLost([Failure(rank=self._rank, kind=RankLost.kind, message=message)])

    def fail(self, failures: Sequence[Failure]) -> None:
        """Raise what went wrong, in the ranks whose caller must hear it. In the others this returns."""
        # Who has lost a rank cannot know whether the last one raises.
        if self._lost or not self.is_read_in_order or self._is_last():
            raise RuntimeError(describe(failures))

    def _is_last(self) -> bool:
        """Whether this is the rank whose reply vLLM reads last."""
        return all(dist.get_rank(group) == dist.get_world_size(group) - 1 for group in self._groups())


def _exchange(group: dist.ProcessGroup, value: T) -> tuple[list[T], set[int]]:
    """Return what the ranks of a group say to each other, in their order, and which ranks say nothing.

    Each pair of ranks has a connection of its own. So it is known who is silent, which an `all_gather` does
    not tell, and no rank waits for one that waits for another.
    """
    own = dist.get_rank()
    ranks = dist.get_process_group_ranks(group)
    said = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = {rank: torch.zeros(1, dtype=torch.int64, device="cpu") for rank in ranks if rank != own}
    announced = _swap(group, torch.tensor([said.numel()], device="cpu"), sizes)
    parts = {
        rank: torch.empty(int(size), dtype=torch.uint8, device="cpu") for rank, size in announced.items()
    }
    # Also if somebody is silent: the others may not know that yet, and wait.
    heard = _swap(group, said, parts)
    values = {own: value}
    for rank, part in heard.items():
        # As torch's own `all_gather_object`: the others are processes of this engine.
        values[rank] = pickle.loads(part.numpy().tobytes())  # noqa: S301 # nosec B301
    silent = sizes.keys() - announced.keys() or parts.keys() - heard.keys()
    return [values[rank] for rank in ranks if rank in values], set(silent)


def _swap(
    group: dist.ProcessGroup, said: torch.Tensor, heard: Mapping[int, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Send a tensor to some ranks of a group, and receive one of each; return those that came."""
    works: dict[int, list[Any]] = {}
    came = {}
    for rank, tensor in heard.items():
        with _logged(rank):
            works[rank] = [dist.irecv(tensor, rank, group, _TAG), dist.isend(said, rank, group, _TAG)]
    for rank, both in works.items():
        with _logged(rank):
            for work in both:
                work.wait()
            came[rank] = heard[rank]
    return came


@contextmanager
def _logged(rank: int) -> Iterator[None]:
    """Go on after an error of gloo, and log it: the error of `Ranks` says only which rank is lost."""
    try:
        yield
    except RuntimeError as exc:
        logger.warning("rank %d of torch.distributed: %s", rank, exc)


def _leave(group: dist.ProcessGroup) -> None:
    """Close the connections of this rank: gloo does that when a wait takes longer than it may."""
    with suppress(RuntimeError):
        never = dist.irecv(torch.empty(1, device="cpu"), group=group, tag=_TAG + 1)
        assert never is not None
        never.wait(timedelta(milliseconds=1))


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
