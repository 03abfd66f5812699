"""Half of a staged change, for tests of writes that fail on the way."""

from dataclasses import replace

from vllm_plugin.live.weights import StagedWrite


def half_of(change: StagedWrite) -> StagedWrite:
    """A change that writes a part of what another one writes, and shares its memory."""
    if change.scatters:
        return StagedWrite(scatters=dict(list(change.scatters.items())[: (len(change.scatters) + 1) // 2]))
    halves = []
    for segments, exchange in change.parts:  # One of `vllm_plugin.gpu.weights`.
        counts = exchange.counts.clone()
        counts[(len(counts) + 1) // 2 :] = 0
        halves.append((segments, replace(exchange, counts=counts)))
    return replace(change, parts=halves)
