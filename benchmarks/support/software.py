"""The vLLM and the processor that a row was measured with."""

import os
from pathlib import Path

import torch


def software(device: torch.device) -> dict[str, str]:
    """Return the version of vLLM and the name of the device."""
    import vllm

    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "?")
        name = f"{os.cpu_count()} cores, {name}"
    return {"vllm": vllm.__version__, "device": name}
