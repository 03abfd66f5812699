"""What `check_own` says of a GPU's memory of each kind, as JSON: null, or the refusal.

Run as a program: torch reads how its allocator works once, from PYTORCH_CUDA_ALLOC_CONF. Needs no vLLM.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch.multiprocessing.reductions import reduce_tensor

from patchstore.errors import UsageError
from vllm_plugin.live.own_memory import check_own

NUM = 1 << 20


def serve(pipe: "torch.multiprocessing.connection.Connection") -> None:
    """Lend tensors to the process that asks, as a daemon of weights does, until it says that it is done."""
    held = [torch.zeros(NUM, device="cuda"), torch.zeros(16, device="cuda")]
    pipe.send([reduce_tensor(each) for each in held])
    pipe.recv()


@contextmanager
def borrowed() -> Iterator[list[torch.Tensor]]:
    """A large and a small tensor of another process."""
    context = torch.multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    # Sent as memory that every driver can send, whichever way this process's own is allocated.
    before = os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    process = context.Process(target=serve, args=(other,))
    process.start()
    if before is not None:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = before
    other.close()
    tensors = [rebuild(*args) for rebuild, args in pipe.recv()]
    try:
        yield tensors
    finally:
        tensors.clear()
        pipe.send("done")
        process.join()


class OnDevice:
    """Pinned memory of the host as a tensor of the device, as vLLM has weights with --cpu-offload-gb."""

    def __init__(self, pinned: torch.Tensor) -> None:
        self._pinned = pinned
        self.__cuda_array_interface__ = {
            "shape": tuple(pinned.shape),
            "typestr": "<f4",
            "data": (pinned.data_ptr(), False),
            "version": 2,
        }


def refusal(tensor: torch.Tensor) -> str | None:
    try:
        check_own([("weight", tensor.untyped_storage())])
    except UsageError as exc:
        return str(exc)
    return None


def mappings(tensor: torch.Tensor) -> str:
    """What the kernel says of a tensor's memory, for the person who repairs `check_own`."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(each, 16) for each in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < end:
            return line
    return "no mapping"


def main() -> None:
    plain = torch.zeros(NUM, device="cuda")
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        pooled = torch.zeros(NUM, device="cuda")
    pinned = torch.zeros(NUM).pin_memory()
    mapped = torch.as_tensor(OnDevice(pinned), device="cuda")
    assert mapped.data_ptr() == pinned.data_ptr(), "torch copied it"
    with borrowed() as (large, small):
        found = {
            "plain": refusal(plain),
            "small": refusal(torch.zeros(1, device="cuda")),
            "pool": refusal(pooled),
            "pinned": refusal(pinned),
            "mapped": refusal(mapped),
            "borrowed": refusal(large),
            "borrowed-small": refusal(small),
            "borrowed-view": refusal(large[5:].view(torch.int32)),
        }
        del large, small
    sys.stderr.write(f"pinned memory: {mappings(pinned)}\ndevice memory: {mappings(plain)}\n")
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
