"""What is done with every element, by kernels for GPUs; `tensors.elements` does the same in plain torch."""

import logging
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

logger = logging.getLogger(__name__)


@cache
def are_usable(device: torch.device) -> bool:
    """Whether kernels run on a device. Where they do not, plain torch does the same, slower.

    Tried with a kernel that does nothing: Triton may be there, and the compiler that it needs may not.
    """
    if device.type != "cuda":
        return False
    try:
        from patchstore.kernels import probe

        probe.run(device)
    except Exception as exc:  # noqa: BLE001 -- whatever is wrong, there is another way
        logger.warning("Triton does not run on %s, so plain torch does its work: %s", device, exc)
        return False
    return True


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream of one's own, for work beside the current one's; None where there are none."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)


def on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Launch what the block launches on a stream, where there is one."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)
