"""The smallest kernel, to see whether one can be compiled and run."""

import torch
import triton
import triton.language as tl


@triton.jit
def _count_up(number):
    tl.store(number, tl.load(number) + 1)


def run(device: torch.device) -> None:
    """Compile and run it."""
    with torch.cuda.device(device):
        number = torch.zeros(1, dtype=torch.int32, device=device)
        _count_up[1,](number)
        if int(number) != 1:
            raise RuntimeError("a kernel ran and did nothing")
