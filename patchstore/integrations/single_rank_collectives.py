"""Code that gathers from other ranks, run by one rank alone: what others would send is filled in.

Nothing is sent. A collective that only moves tensors returns what this rank has in its place, and a filling
in the places of others. Any other collective raises, as it reaches torch's dispatcher.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

_REPLACED = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
)


class NotAlone(Exception):
    """This code needs other ranks."""


class Alone:
    """What stands in for other ranks."""

    def __init__(self, filling: float) -> None:
        self.num_filled = 0
        """How many tensors of other ranks were filled in."""
        self._filling = filling

    def fill(self, tensor: torch.Tensor) -> None:
        self.num_filled += 1
        tensor.fill_(self._filling)

    def all_gather(self, tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        for rank, each in enumerate(tensor_list):
            if rank == dist.get_rank(group):
                each.copy_(tensor)
            else:
                self.fill(each)
        return _done(async_op)

    def all_gather_into_tensor(
        self, output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False
    ) -> Any:
        parts = list(output_tensor.reshape(dist.get_world_size(group), -1).unbind())
        return self.all_gather(parts, input_tensor.reshape(-1), group, async_op)

    def all_gather_object(self, object_list: Any, obj: Any, group: Any = None) -> None:
        object_list[:] = [None] * len(object_list)
        object_list[dist.get_rank(group)] = obj

    def broadcast(
        self, tensor: Any, src: Any = None, group: Any = None, async_op: bool = False, group_src: Any = None
    ) -> Any:
        if not _is_own(src, group, group_src):
            self.fill(tensor)
        return _done(async_op)

    def broadcast_object_list(
        self,
        object_list: Any,
        src: Any = None,
        group: Any = None,
        device: Any = None,
        group_src: Any = None,
        **rest: Any,
    ) -> None:
        if not _is_own(src, group, group_src):
            raise NotAlone("another rank broadcasts an object")

    def batch_isend_irecv(self, p2p_op_list: Any) -> Any:
        # torch would open a group of calls of the backend before it is refused, and leave it open.
        raise NotAlone("other ranks send to this one, or receive from it")

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Return at once: there is no other rank to wait for."""


@contextmanager
def alone(filling: float) -> Iterator[Alone]:
    """Have this thread's collectives end here, with `filling` in tensors of other ranks. Those of other
    threads are as ever.
    """
    thread, stand_in = threading.get_ident(), Alone(filling)
    replaced: dict[str, Any] = {}
    for name in _REPLACED:
        replaced[name] = getattr(dist, name)
        setattr(dist, name, _for_thread(thread, replaced[name], getattr(stand_in, name)))
    try:
        with _NoneSent():  # type: ignore[no-untyped-call]
            yield stand_in
    finally:
        for name, function in replaced.items():
            setattr(dist, name, function)


class _NoneSent(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises where a collective is sent after all."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in {"c10d", "_c10d_functional", "c10d_functional", "_dtensor"}:
            raise NotAlone(f"it calls {func}")
        return func(*args, **(kwargs or {}))


def _for_thread(thread: int, real: Callable[..., Any], filled: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return (filled if threading.get_ident() == thread else real)(*args, **kwargs)

    return call


def _is_own(src: Any, group: Any, group_src: Any) -> bool:
    if group_src is not None:
        return bool(group_src == dist.get_rank(group))
    return bool((0 if src is None else src) == dist.get_rank())


class _Done:
    """The handle of a collective that is over."""

    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _done(async_op: bool) -> _Done | None:
    return _Done() if async_op else None
