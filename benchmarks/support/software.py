"""The vLLM and the processor that a row was measured with."""

import os
from pathlib import Path

import torch


def software(device: torch.device) -> dict[str, str]:
    """Return the version of vLLM, where it is installed, and the name of the device."""
    try:
        import vllm

        version = {"vllm": str(vllm.__version__)}
    except ImportError:
        version = {}
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "?")
        name = f"{os.cpu_count()} cores, {name}"
    return {**version, "device": name}
