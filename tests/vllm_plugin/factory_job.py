"""A trainer in FSDP2 that uses vLLM's factory of trainer engines, on every rank."""

from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from patchstore.follow.vllm_server import VllmServer


class Held:
    """What a rank keeps from one task to the next."""

    engine: Any = None
    model: Any = None


def module_of(checkpoint: str) -> nn.Module:
    """Return a module with the parameters of a checkpoint, without the package that made it."""
    root = nn.Module()
    for name, tensor in load_file(checkpoint).items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, nn.Parameter(tensor.float()))
    return root


def begin(
    rank: int,
    checkpoint: str | None,
    store: str,
    server: str | None,
    kind: str = "",
    encoding: str = "auto",
) -> None:
    """Open the engine, as a user of vLLM does; without a checkpoint, for the model that there is."""
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from vllm_plugin.trainer import DeltaTrainerInitInfo

    if checkpoint is not None:
        Held.model = fully_shard(module_of(checkpoint))
    client: Any = None
    options = {"rank_timeout_s": 60, "resume": "auto", "encoding": encoding, "anchor_every": 100}
    if server is not None:
        client = VllmServer(server) if kind == "ours" else HTTPVLLMWeightSyncClient(server)
    Held.engine = WeightTransferTrainerFactory.trainer_init(
        DeltaTrainerInitInfo(store, rank=rank, publisher=options),
        client=client,
        source=ModuleSource(Held.model),
    )


def step(rank: int, number: int) -> int:
    """Change some weights of each shard and send them; return the version."""
    for each in Held.model.parameters():
        each.data.to_local().view(-1)[number::7] *= 1.25
    Held.engine.send_weights(number)
    version: int = Held.engine.last.result().version
    return version


def end(rank: int) -> None:
    Held.engine.shutdown()
    Held.engine.shutdown()


def refused(rank: int, store: str) -> list[str]:
    """Return how impossible arguments are refused."""
    from vllm_plugin.trainer import DeltaTrainerInitInfo, DeltaTrainerWeightTransferEngine

    found = []
    for info, arguments in (
        (DeltaTrainerInitInfo(store, rank=rank), {"source": None}),
        (
            DeltaTrainerInitInfo(store, rank=(rank + 1) % dist.get_world_size()),
            {"source": {"w": torch.ones(2)}},
        ),
        (DeltaTrainerInitInfo(store, rank=rank), {"source": {"w": torch.ones(2)}, "client": "http://server"}),
    ):
        try:
            DeltaTrainerWeightTransferEngine.trainer_init(info, **arguments)
        except Exception as exc:  # noqa: BLE001 -- the test looks at it
            found.append(f"{type(exc).__name__}: {exc}")
    return found
