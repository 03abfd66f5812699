"""Weights that other processes could see are found, wherever they are; a GPU's are in `test_gpu`."""

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from server_process import ServerProcess

from patchstore.bucket.records import Schema, TensorSpec
from patchstore.errors import UsageError
from vllm_plugin.live.derived import Derived, constructed, loaded
from vllm_plugin.live.models import ServedModels
from vllm_plugin.live.own_memory import check_own

NUM = 1 << 14


def file_of(folder: Path) -> str:
    path = folder / "weights"
    path.write_bytes(bytes(4 * NUM))
    return str(path)


def in_named_shared_memory(folder: Path) -> torch.Tensor:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        return torch.zeros(NUM).share_memory_()
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def in_a_memory_file(folder: Path) -> torch.Tensor:
    descriptor = os.memfd_create("weights")
    os.ftruncate(descriptor, 4 * NUM)
    with os.fdopen(descriptor):
        return torch.frombuffer(mmap.mmap(descriptor, 4 * NUM), dtype=torch.float32)


def in_a_storage_of_a_file(folder: Path) -> torch.Tensor:
    storage = torch.UntypedStorage.from_file(file_of(folder), shared=True, nbytes=4 * NUM)
    return torch.empty(0).set_(storage)


def from_safetensors(folder: Path) -> torch.Tensor:
    save_file({"a": torch.zeros(NUM)}, folder / "model.safetensors")
    return load_file(folder / "model.safetensors")["a"]


def from_a_mapped_checkpoint(folder: Path) -> torch.Tensor:
    torch.save({"a": torch.zeros(NUM)}, folder / "model.pt")
    return torch.load(folder / "model.pt", mmap=True)["a"]


FOREIGN: dict[str, Callable[[Path], torch.Tensor]] = {
    "shared memory": lambda folder: torch.zeros(NUM).share_memory_(),
    "shared memory with a name": in_named_shared_memory,
    "a file in memory": in_a_memory_file,
    "a file": lambda folder: torch.from_file(file_of(folder), shared=True, size=NUM),
    "a storage": in_a_storage_of_a_file,
    # torch does not know that these are shared.
    "numpy": lambda folder: torch.from_numpy(np.memmap(file_of(folder), dtype=np.float32, mode="r+")),
    "the end of a file": lambda folder: torch.from_numpy(
        np.memmap(file_of(folder), dtype=np.float32, mode="r+")[-1:]
    ),
}
OWN: dict[str, Callable[[Path], torch.Tensor]] = {
    "plain": lambda folder: torch.zeros(NUM),
    "nothing": lambda folder: torch.zeros(0),
    "without elements": lambda folder: torch.zeros(NUM, device="meta"),
    # torch says of this that it is shared.
    "a file": lambda folder: torch.from_file(file_of(folder), shared=False, size=NUM),
    "numpy": lambda folder: torch.from_numpy(np.memmap(file_of(folder), dtype=np.float32, mode="c")),
    "safetensors": from_safetensors,
    "a checkpoint": from_a_mapped_checkpoint,
    # Pinned memory may look like this.
    "without a file": lambda folder: torch.frombuffer(mmap.mmap(-1, 4 * NUM), dtype=torch.float32),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_memory_that_others_can_map_is_refused_by_name(tmp_path, kind):
    tensor, own = FOREIGN[kind](tmp_path), torch.zeros(NUM)
    given = {"own": own, "first": tensor, "second": tensor}
    with pytest.raises(UsageError, match=r"'first' is in shared memory, mapped from /.*, as are 1 more"):
        check_own((name, each.untyped_storage()) for name, each in given.items())


@pytest.mark.parametrize("kind", OWN)
def test_memory_of_this_process_alone_is_written_to(tmp_path, kind):
    tensor = OWN[kind](tmp_path)
    check_own([("own", tensor.untyped_storage())])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    if not tensor.is_meta:
        tensor.fill_(1)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


class Doubled(torch.nn.Module):
    """Keeps twice its weight in a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.register_buffer("rotations", torch.ones(4), persistent=False)
        constructed(self)
        self.process_weights_after_loading(torch.float32)
        loaded(self)

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        self.twice = self.weight.detach() * 2

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            getattr(self, name).data.copy_(tensor)


@pytest.mark.parametrize("is_calculated", [False, True])
def test_only_what_updates_write_to_has_to_be_own_and_nothing_is_written_before(is_calculated):
    schema = Schema(tensors=(TensorSpec(name="weight", dtype="F32", shape=(4,)),), tied={})
    model = Doubled()

    def trace() -> None:
        hook = Doubled.process_weights_after_loading
        derived = Derived([model], lambda module: hook(module, torch.float32), hooks=not is_calculated)
        load = Doubled.load_weights
        ServedModels([model], load, derived, is_calculated=is_calculated).trace(schema)

    trace()
    # Of what vLLM loads as whole layers it is not known what stays.
    if not is_calculated:
        model.rotations.share_memory_()
        trace()
    for tensor, name in ((model.twice, "twice"), (model.weight.data, "weight")):
        if is_calculated and name == "twice":
            continue
        tensor.share_memory_()
        factors = torch.ones(4, requires_grad=True)
        products = factors * tensor
        with pytest.raises(UsageError, match=f"'{name}' is in shared memory"):
            trace()
        # torch refuses this where the tensor was written to since.
        products.sum().backward()


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_a_server_whose_weights_others_map_does_not_start(model, tmp_path):
    process = ServerProcess(
        tmp_path / "vllm.log", "--worker-extension-cls", "failing_extension.SharingExtension"
    )
    with pytest.raises(RuntimeError, match="did not start"):
        process.start(model)
    said = process.log.read_text()
    assert "'model.norm.weight' is in shared memory, mapped from /dev/shm/" in said
    assert "without --load-format ipc_cache" in said
