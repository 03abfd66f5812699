"""How far the memory of this process grows during a block."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch


@contextmanager
def peak_memory(device: torch.device) -> Iterator[dict[str, int]]:
    """Measure how far memory grows: `host` (resident, with mapped files) and `device`, in bytes."""
    peak: dict[str, int] = {}
    gc.collect()
    # Resets VmHWM of this process, which some containers do not allow.
    has_reset = False
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        has_reset = True
    before, allocated = _status("VmRSS"), 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
    yield peak
    if has_reset:
        peak["host"] = _status("VmHWM") - before
    if device.type == "cuda":
        peak["device"] = torch.cuda.max_memory_allocated() - allocated


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024
