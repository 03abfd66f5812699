"""Interrupts at each point of a call, one after the other."""

import sys
from collections.abc import Callable, Iterator
from types import FrameType

import torch


class Interrupter:
    """Raises KeyboardInterrupt at the n-th point of a call at which Python might handle a signal."""

    FINELY = (
        "patchstore/publish/publisher.py",
        "patchstore/publish/pipeline.py",
        "patchstore/support/threads.py",
        "patchstore/tensors/columns.py",
        "threading.py",
        "contextlib.py",
    )

    def __init__(self, left: int, *, within: str | tuple[str, ...] = "") -> None:
        """Count points in files whose names end so, or in one of these ways."""
        self.left, self.within = left, within

    def __call__(self, frame: FrameType, event: str, argument: object) -> "Interrupter | None":
        if not frame.f_code.co_filename.endswith(self.within):
            return None
        frame.f_trace_opcodes = frame.f_code.co_filename.endswith(self.FINELY)
        # Not where a generator is left: that may be its destructor, out of which nothing is raised.
        if event in {"opcode", "line"}:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self

    def during(self, call: Callable[..., object], *arguments: object) -> bool:
        """Make a call; return whether it was interrupted, which must leave gradients on."""
        is_interrupted = next(self._during(call, *arguments))
        assert torch.is_grad_enabled()
        return is_interrupted

    def _during(self, call: Callable[..., object], *arguments: object) -> Iterator[bool]:
        # A generator, as that handles exceptions apart from its caller. One that is raised where a handler
        # ends, as no signal raises it, would leave the handled one as that of the thread.
        sys.settrace(self)
        try:
            call(*arguments)
        except KeyboardInterrupt:
            is_interrupted = True
        else:
            is_interrupted = False
        finally:
            sys.settrace(None)
        yield is_interrupted
