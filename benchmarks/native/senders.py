"""The trainer's side of vLLM's own weight transfers, in the forms that it has from vLLM 0.26 to 0.33."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from vllm.distributed.weight_transfer import ipc_engine, nccl_engine, sparse_nccl_engine
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from benchmarks.native.changes import Changes, fused
from examples.processes import free_port

_TAKES_CHECKPOINT_NAMES = hasattr(sparse_nccl_engine, "CheckpointWeightPatch")
"""From 0.29 on. Before, a patch is of the parameter that vLLM serves."""


Send = Callable[[Sequence[Any]], None]
"""Sends the weights as they are now, or what `as_patches` made; the server has them when it returns."""


def as_patches(changes: Iterable[Changes]) -> list[Any]:
    """Return what a sender of `sparse_nccl` takes."""
    if not _TAKES_CHECKPOINT_NAMES:
        changes = fused(changes)
    form = sparse_nccl_engine.SparseWeightPatch
    shapes = {"full_shape"} & set(form.__dataclass_fields__)
    return [
        form(each.name, each.indices, each.values, **dict.fromkeys(shapes, each.shape)) for each in changes
    ]


def open_sender(backend: str, tensors: Mapping[str, torch.Tensor], url: str, patience_s: float) -> Send:
    """Connect to a server whose engine is of this backend: `nccl`, `sparse_nccl` or `ipc`.

    Dense transfers are packed. The current device is the one that sends.

    Args:
        patience_s: for each call of the server.
    """
    client = HTTPVLLMWeightSyncClient(url, timeout=patience_s)
    if backend == "ipc":
        return _open_ipc(tensors, client)
    group = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": 2}
    # Before 0.28, the trainer makes each call itself.
    if not hasattr(nccl_engine, "NCCLTrainerInitInfo"):
        return _open_older_nccl(backend == "nccl", tensors, client, group)
    if backend == "nccl":
        return _open(nccl_engine.NCCLTrainerInitInfo(rank=0, packed=True, **group), client, tensors)
    info = sparse_nccl_engine.SparseNCCLTrainerInitInfo(rank=0, **group)
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client)
    send: Send = engine.send_weights
    return send


def _open(info: Any, client: HTTPVLLMWeightSyncClient, tensors: Mapping[str, torch.Tensor]) -> Send:
    source = ModuleSource(_Module(tensors))
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    return lambda _: engine.send_weights()


class _Module:
    """All that vLLM's `ModuleSource` asks of a module."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors.items())


def _open_ipc(tensors: Mapping[str, torch.Tensor], client: HTTPVLLMWeightSyncClient) -> Send:
    # A tensor is never sent in parts.
    largest = max(tensor.nbytes for tensor in tensors.values())
    packing: dict[str, Any] = {"packed": True, "packed_buffer_size_bytes": max(largest, 1 << 30)}
    if hasattr(ipc_engine, "IPCTrainerInitInfo"):
        return _open(ipc_engine.IPCTrainerInitInfo(rank=0, **packing), client, tensors)
    client.init_weight_transfer_engine({})
    how = ipc_engine.IPCTrainerSendWeightsArgs(send_mode="http", url=client.base_url, **packing)

    def send(_: Sequence[Any]) -> None:
        client.start_weight_update()
        ipc_engine.IPCWeightTransferEngine.trainer_send_weights(iter(tensors.items()), how)
        client.finish_weight_update()

    return send


def _open_older_nccl(
    is_dense: bool,
    tensors: Mapping[str, torch.Tensor],
    client: HTTPVLLMWeightSyncClient,
    info: Mapping[str, Any],
) -> Send:
    dense, sparse = nccl_engine.NCCLWeightTransferEngine, sparse_nccl_engine.SparseNCCLWeightTransferEngine
    engine = dense if is_dense else sparse
    with ThreadPoolExecutor(1) as beside:
        joined = beside.submit(client.init_weight_transfer_engine, {**info, "rank_offset": 1})
        group = engine.trainer_init(dict(info))
        joined.result()
    how = nccl_engine.NCCLTrainerSendWeightsArgs(group=group, packed=is_dense)

    def send(patches: Sequence[Any]) -> None:
        if is_dense:
            names, values = list(tensors), list(tensors.values())
            more: dict[str, Any] = {"packed": True}
            sent: Iterator[Any] = iter(tensors.items())
        else:
            names, values = [patch.name for patch in patches], [patch.values for patch in patches]
            more = {"num_updates_list": [patch.indices.numel() for patch in patches]}
            sent = iter(patches)
        told = {
            "names": names,
            "dtype_names": [str(each.dtype).removeprefix("torch.") for each in values],
            "shapes": [list(each.shape) for each in values],
            **more,
        }
        client.start_weight_update()
        with ThreadPoolExecutor(1) as beside:
            received = beside.submit(client.update_weights, told)
            engine.trainer_send_weights(sent, how)
            received.result()
        client.finish_weight_update()

    return send
