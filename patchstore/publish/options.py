"""Checks of a publisher's arguments, and of the process that it runs in."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from patchstore.bucket.lineage import Every, check_every
from patchstore.codec import CHOICES, ENCODINGS, Encoding
from patchstore.codec.context import Context
from patchstore.errors import RunExists, UsageError, VersionConflict
from patchstore.signing import PublicKey, Signer
from patchstore.support.arguments import whole_number


@contextmanager
def threads_start() -> Iterator[None]:
    try:
        yield
    except RuntimeError as exc:
        if "can't start new thread" not in str(exc):
            raise
        raise UsageError(
            "this process cannot start the threads that a publisher needs; raise the limit of processes "
            f"(ulimit -u, or the container's pids limit): {exc}"
        ) from exc


def check_process(what: str, process: int) -> None:
    """Raise UsageError in a fork of the process in which something began: it has none of the threads."""
    if (here := os.getpid()) != process:
        raise UsageError(
            f"this {what} belongs to process {process}, and this is {here}, a fork of it without its "
            "threads; publish, and wait for results, in the process that opened the publisher"
        )


@contextmanager
def on_one_rank() -> Iterator[None]:
    """If another publisher has the run, add to the error which rank should publish."""
    try:
        yield
    except (RunExists, VersionConflict) as exc:
        rank = _rank()
        if rank is None:
            raise
        if rank.startswith("rank 0 "):
            raise type(exc)(
                f"{exc}. This is {rank}: if the others open a Publisher too, let only this one do so, or "
                "pass group= on all of them"
            ) from exc
        raise type(exc)(
            f"this is {rank}, and this Publisher publishes alone: open it only where "
            "torch.distributed.get_rank() == 0, and let the other ranks go on without one; or pass group= on "
            f"all ranks that publish together. {exc}"
        ) from exc


def is_distributed() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _rank() -> str | None:
    """Return such as "rank 0 of 4", as far as this process knows; None if it seems alone."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, num_ranks = str(torch.distributed.get_rank()), str(torch.distributed.get_world_size())
    else:
        rank, num_ranks = (
            os.environ.get("RANK", os.environ.get("LOCAL_RANK", "")),
            os.environ.get("WORLD_SIZE", ""),
        )
    if not rank.isdecimal() or num_ranks == "1":
        return None
    if not num_ranks.isdecimal():
        return None if rank == "0" else f"rank {rank}"
    return f"rank {rank} of {num_ranks}"


@dataclass(frozen=True, slots=True)
class Resume:
    """What a publisher does where there is a run, and where there is none."""

    how: Literal["new", "same", "version", "anchor", "auto"]
    """Begin a run; go on from the newest version with these weights, or from one version that has them; go on
    behind the newest version with any weights; or whichever is possible."""
    version: int | None = None

    @classmethod
    def of(cls, value: Any) -> "Resume":
        if isinstance(value, bool):
            return cls("same" if value else "new")
        if isinstance(value, str) and value in {"anchor", "auto"}:
            return cls("anchor" if value == "anchor" else "auto")
        if not hasattr(value, "__index__"):
            raise UsageError(f'resume must be True, False, a version, "anchor" or "auto", not {value!r}')
        return cls("version", whole_number("resume", value, least=0))

    def __str__(self) -> str:
        """As ranks compare it: 0 is not False, and 1 is not True."""
        return {"new": "False", "same": "True", "version": str(self.version)}.get(self.how, self.how)

    @property
    def may_begin(self) -> bool:
        return self.how in {"new", "auto"}

    @property
    def needs_weights(self) -> bool:
        return self.how not in {"new", "anchor"}


def anchor_interval(value: Any, *, compact: Any) -> Every | None:
    """Return after how many publications an anchor is due, here or from another process; None if none is."""
    if type(compact) is not bool:
        raise UsageError(f"compact must be True or False, not {compact!r:.100}")
    if value is None or (isinstance(value, str) and value == "auto"):
        if compact and value is None:
            raise UsageError(
                "compact=True adds the anchors that anchor_every asks for: give a number of publications, or "
                '"auto", instead of None'
            )
        return None if value is None else "auto"
    number = whole_number("anchor_every", value, least=1)
    return check_every(number) if compact else number


def check_encoding(value: Any) -> None:
    if value not in CHOICES:
        raise UsageError(f"encoding must be one of {', '.join(CHOICES)}, not {value!r}")


def seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UsageError(f"{name} must be a positive number of seconds, not {value!r}")
    return float(value)


def signer_name(signer: Signer | None) -> str | None:
    """Return what a signer's key is called; None without a signer."""
    if signer is None:
        return None
    key = getattr(signer, "public_key", None)
    if not isinstance(key, PublicKey) or not callable(getattr(signer, "sign", None)):
        raise UsageError(
            "signer must have a public_key and a method sign, such as patchstore.signing.KeySigner(path), "
            f"not be a {type(signer).__name__}"
        )
    return key.name


_TOO_FEW_BYTES = 1 << 15
"""To save so many is not worth an anchor, for whose upload the second call after it waits."""


def chosen_encoding(name: str, *, has_kernels: bool, of_adapter: bool = False) -> Encoding:
    """Return the encoding of a publisher's choice.

    `auto` is `context` where kernels encode it. On the CPU `context` takes a second for 70 million elements,
    however few of them have changed, so it is for tensors of which much has: see `Context.only_dense`. A
    server's CPU decodes adapters, of which much changes: that would take seconds, so they have `gap`.
    """
    if name == "auto" and of_adapter:
        return ENCODINGS["gap"]
    return Context(only_dense=not has_kernels) if name == "auto" else ENCODINGS[name]


def encoding_of_rollups(encoding: Encoding) -> str:
    """Return the name of the encoding of rollups, which a process on the CPU makes of many deltas."""
    return encoding.index.name if isinstance(encoding, Context) and encoding.only_dense else encoding.name


def largest_delta(name: str, anchor_bytes: int, *, of_adapter: bool = False) -> int | None:
    """Return how large a delta may be: an anchor takes the place of a larger one.

    Whole weights must save more than a little by that; an adapter is uploaded soon. None where the user has
    chosen the encoding.
    """
    if name != "auto":
        return None
    return anchor_bytes if of_adapter else anchor_bytes + _TOO_FEW_BYTES
