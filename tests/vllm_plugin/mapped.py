"""The live weights of plain modules, mapped to a schema without a server."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from patchstore.bucket.records import Schema
from vllm_plugin.live.derived import Derived
from vllm_plugin.live.models import ServedModels
from vllm_plugin.live.weights import LiveWeights
from vllm_plugin.map.mapping import WeightMap, share


def load(model: torch.nn.Module, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Call a module's own loader."""
    model.load_weights(weights)


def served(*models: torch.nn.Module, **options: Any) -> ServedModels:
    """Models that make nothing of their weights."""
    return ServedModels(models, options.pop("load", load), Derived([], print), **options)


def mapped(
    schema: Schema, *models: ServedModels, kinds: Iterable[type[LiveWeights]] = (LiveWeights,)
) -> list[LiveWeights]:
    """The weights of each rank of one server; of all kinds, of each."""
    traces = [each.trace(schema) for each in models]
    shares = [share(traced) for traced in traces]
    found = []
    for each, traced in zip(models, traces, strict=True):
        for kind in kinds:
            found.append(kind(each))
            found[-1].follow(WeightMap(schema, traced, shares))
    return found
