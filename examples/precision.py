"""What a trainer of the examples computes in: bf16 where the machine does that fast, fp32 elsewhere.

A CPU without instructions for bf16 imitates them. With AVX2 alone, a step of the demo took 24 s in bf16, and
0.8 s in fp32; with AVX-512 for bf16 it took 0.5 s.
"""

import time
from functools import cache

import torch

_ROWS, _WIDTH = 128, 768
"""Of the product that is timed: a layer of the demo, and an eighth of its batch."""


def autocast(device: str = "cpu") -> torch.autocast:
    """Return a context in which a model's forward pass computes in the faster of both."""
    return torch.autocast(device, torch.bfloat16, enabled=device != "cpu" or _bf16_is_fast())


@cache
def _bf16_is_fast() -> bool:
    """Ask the CPU, not a list of CPUs: BLAS, oneDNN and their settings decide too. Takes up to 0.5 s."""
    return _step_s(enabled=True) < _step_s(enabled=False)


def _step_s(*, enabled: bool) -> float:
    """Return the seconds of a product and its gradients; the first, which also prepares, does not count."""
    rows = torch.ones(_ROWS, _WIDTH, requires_grad=True)
    weight = torch.ones(_WIDTH, _WIDTH, requires_grad=True)
    taken = []
    for _ in range(4):
        began = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            product = torch.nn.functional.linear(rows, weight)
        product.float().mean().backward()  # type: ignore[no-untyped-call]
        taken.append(time.perf_counter() - began)
    return min(taken[1:])
