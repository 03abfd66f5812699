"""An engine of one rank that no vLLM has made, over a plain module."""

import warnings
from types import SimpleNamespace

import torch
from mapped import load, served

from patchstore.read.host_cache import HostCache
from patchstore.stores.base import Store
from vllm_plugin.engine import DeltaWeightTransferEngine
from vllm_plugin.live.update import Updater
from vllm_plugin.live.weights import LiveWeights
from vllm_plugin.map.mapping import share
from vllm_plugin.ranks import Ranks


class Plain(torch.nn.Module):
    """Serves tensors as a checkpoint has them."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        for name, size in sizes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)))

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            getattr(self, name).data.copy_(tensor)


def bare_engine(
    store: Store,
    model: torch.nn.Module,
    cache: HostCache,
    *,
    rank: int = 0,
    ranks: Ranks | None = None,
) -> DeltaWeightTransferEngine:
    """Make an engine that has opened a store, and holds no version."""
    nothing = SimpleNamespace()
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(rank=rank, world_size=1, distributed_executor_backend="uni"),
        model_config=SimpleNamespace(quantization=None, hf_config=nothing, hf_text_config=nothing),
        load_config=SimpleNamespace(load_format="dummy"),
    )
    with warnings.catch_warnings():
        # What vLLM's executors import warns of itself.
        warnings.simplefilter("ignore")
        engine = DeltaWeightTransferEngine(nothing, config, torch.device("cpu"), model)
    engine.serving = SimpleNamespace(
        models=lambda worker: [model],
        check_layout=lambda models: None,
        is_calculated=False,
        is_loaded_quantized=False,
        form="plain",
        check_fits=print,
        load=load,
        refresh=print,
    )
    engine.ranks = ranks or Ranks(rank, list, is_read_in_order=False)
    engine.live = LiveWeights(served(model))
    engine.updater = updater = Updater(store, engine.live, cache)
    traced = updater.weights.trace()
    updater.weights.follow(traced, [share(traced)])
    engine.is_open = True
    return engine


def update(engine: DeltaWeightTransferEngine, version: int, **options: object) -> None:
    engine.start_weight_update()
    engine.update_weights({"version": version, **options})
    engine.finish_weight_update()
