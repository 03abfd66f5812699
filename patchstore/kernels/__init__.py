"""What is done with every element, by kernels for GPUs; `tensors.elements` does the same in plain torch."""

import logging
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
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


def pinned(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return host memory, uint8, which a GPU copies from without a buffer in between.

    Torch keeps it for the next time. Where no more can be pinned it is other memory.
    """
    if device.type == "cuda":
        with suppress(RuntimeError):
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


def sent(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Bring an array of the host to a device, without waiting for what that does already.

    On the CPU the tensor shares the array's memory.
    """
    given = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return given
    memory = pinned(array.nbytes, device).view(given.dtype).view(given.shape)
    return memory.copy_(given).to(device, non_blocking=True)


def device_guard(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one while the block runs: Triton compiles for that, and launches there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Launch what the block launches on a stream, where there is one."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)
