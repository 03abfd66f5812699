"""Tensors of a version that are rebuilt on the device, beside those that are rebuilt on the CPU."""

import re
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from patchstore import Publisher
from patchstore.bucket.records import Plan
from patchstore.bucket.state_sums import SumsArray
from patchstore.errors import LoadFailed, StateMismatch
from patchstore.read.anchors import open_anchor, stream_anchor
from patchstore.read.deltas import Deltas, open_deltas
from patchstore.read.host_cache import USES, HostCache
from patchstore.read.rebuild import File, patched
from patchstore.read.run import Run
from patchstore.stores.memory import MemoryStore
from patchstore.tensors.bits import bits
from tests.support.interpreted import DEVICE, kernels
from vllm_plugin.live.models import explained


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {
        "bias": torch.randn(7),
        "codes": (torch.randn(64, 48)).to(torch.float8_e4m3fn),
        "empty": torch.zeros(0, 4, dtype=torch.bfloat16),
        "flags": torch.randint(0, 2, (9,)).bool(),
        "half": torch.randn(40, 33).to(torch.float16),
        "matrix": (0.02 * torch.randn(96, 64)).to(torch.bfloat16),
        "experts": (0.02 * torch.randn(3, 32, 64)).to(torch.bfloat16),
        "steps": torch.arange(5),
    }


def step(current: dict[str, torch.Tensor], seed: int) -> None:
    """Change some elements of every tensor, and none of `half` in every second step."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in current.items():
        if tensor.numel() and not (name == "half" and seed % 2):
            flat = bits(tensor)
            some = torch.rand(flat.shape, generator=generator) < 0.03
            some[seed % len(some)] = True
            flat[some] ^= 1


@pytest.mark.parametrize("encoding", ["context", "gap"])
@pytest.mark.parametrize("together", [pytest.param(1, marks=pytest.mark.exhaustive), None])
def test_a_version_is_rebuilt_on_the_device_as_on_the_cpu(encoding: str, together: int | None, tmp_path):
    rebuilding = kernels("vllm_plugin.gpu.rebuild")
    store, current = MemoryStore(), weights()
    with Publisher(store, current, encoding=encoding, anchor_every=100, dtype=None) as publisher:
        publisher.publish_patch(0).result()
        for seed in range(1, 4):
            step(current, seed)
            publisher.publish_patch(seed).result()
    run, cache = Run.open(store), HostCache(tmp_path)
    plan = run.plan(3)
    assert plan.anchor is not None and len(plan.deltas) == 3
    with open_deltas(store, plan.deltas, run.schema, None, cache) as deltas:
        contents = deltas.contents()
        assert contents is not None
        rebuilder = rebuilding.DeviceRebuilder(run.schema, DEVICE)
        rebuilder.warm_up()
        rebuilder.contents = contents
        rebuilder.together = together or rebuilder.together
        given = stream_anchor(store, plan.anchor, run.schema.by_name(), cache)
        expected, expected_sums = rebuilt(given, run, deltas)
        found, sums = rebuilt(mapped(run, plan, cache), run, deltas, elsewhere=rebuilder)
    assert found.keys() == expected.keys() == current.keys()
    for name, tensor in found.items():
        assert tensor.device.type == DEVICE.type and tensor.shape == current[name].shape
        assert torch.equal(bits(tensor.cpu()), bits(current[name])), name
        assert torch.equal(bits(expected[name]), bits(current[name])), name
    assert np.array_equal(sums, expected_sums)


def mapped(run: Run, plan: Plan, cache: HostCache) -> Iterator[File]:
    """An anchor as it is in the cache, which stays as it is."""
    assert plan.anchor is not None
    by_name = run.schema.by_name()
    with open_anchor(run.store, plan.anchor, by_name, cache) as anchor:
        before = {name: tensor.clone() for name, tensor in anchor.items()}
        yield "", [by_name[name] for name in anchor], iter(anchor.values())
        assert all(torch.equal(bits(anchor[name]), bits(tensor)) for name, tensor in before.items())


def rebuilt(files: Iterable[File], run: Run, deltas: Deltas, **more) -> tuple[dict, SumsArray]:
    sums = np.zeros((len(run.schema.tensors), 2), dtype=np.uint64)
    found = {}
    for _, specs, tensors in patched(files, run.schema, deltas, sums, **more):
        found.update(zip((spec.name for spec in specs), tensors, strict=True))
    return found, sums


def of_two_versions(current: dict[str, torch.Tensor]) -> Run:
    """A run whose second version has the bits that `current` has then."""
    store = MemoryStore()
    with Publisher(store, current, anchor_every=100, dtype=None) as publisher:
        publisher.publish_patch(0).result()
        step(current, 1)
        publisher.publish_patch(1).result()
    return Run.open(store)


def test_a_batch_without_room_is_rebuilt_on_the_cpu(tmp_path):
    class NoRoom:
        together, under_way_bytes = 1000, 1 << 20

        def __call__(self, batch):
            raise torch.OutOfMemoryError("no room")

    current = weights()
    run, cache = of_two_versions(current), HostCache(tmp_path)
    plan = run.plan(1)
    with open_deltas(run.store, plan.deltas, run.schema, None, cache) as deltas:
        found, _ = rebuilt(mapped(run, plan, cache), run, deltas, elsewhere=NoRoom())
    assert all(torch.equal(bits(found[name]), bits(tensor)) for name, tensor in current.items())


@pytest.fixture
def outcomes(monkeypatch) -> list[bool]:
    """Has a server's loader rebuild on a device, also if there is none; of each batch, whether it was."""
    pytest.importorskip("vllm_plugin.loader")
    rebuilder = kernels("vllm_plugin.gpu.rebuild").DeviceRebuilder
    rebuild, found = rebuilder.__call__, []

    def called(self, batch):
        found.append(False)
        place = len(found) - 1
        rebuilt = rebuild(self, batch)
        found[place] = True
        return rebuilt

    monkeypatch.setattr(rebuilder, "__call__", called)
    monkeypatch.setattr("vllm_plugin.loader.are_usable", lambda device: True)
    monkeypatch.setattr("patchstore.read.rebuild.MAX_THREADS", 1)
    return found


def loaded(current: dict[str, torch.Tensor], cache: HostCache) -> dict[str, torch.Tensor]:
    """What a server is given of the second version, whose bits `current` has then."""
    from vllm_plugin import loader

    run = of_two_versions(current)
    found = dict(loader.rebuilt(run, cache, run.plan(1), DEVICE))
    assert found.keys() == current.keys()
    assert all(torch.equal(bits(found[name].cpu()), bits(tensor)) for name, tensor in current.items())
    return found


def test_a_server_is_given_a_version_that_was_rebuilt_on_its_device(outcomes, tmp_path):
    current = weights()
    current["tied"] = current["matrix"]
    found = loaded(current, HostCache(tmp_path))
    assert outcomes == [True]
    # It lets go of all that it read, in the time that it takes.
    for thread in threading.enumerate():
        if thread.name == "patchstore-let-go":
            thread.join()
    assert not (tmp_path / USES).exists()
    # Some loaders write to what they are given.
    assert found["tied"].data_ptr() != found["matrix"].data_ptr()


def test_a_loader_that_keeps_all_tensors_is_left_half_of_the_devices_memory(outcomes, monkeypatch, tmp_path):
    rebuilding = kernels("vllm_plugin.gpu.rebuild")
    monkeypatch.setattr(rebuilding.DeviceRebuilder, "together", 1)
    # All that a batch takes is kept.
    rooms = iter(range(30_000, 0, -1000))
    monkeypatch.setattr(rebuilding, "room_on", lambda device: next(rooms))
    monkeypatch.setattr(rebuilding.DeviceRebuilder, "warm_up", lambda self: None)
    said: list[str] = []
    monkeypatch.setattr(rebuilding.logger, "info", lambda text, *args: said.append(text % args))
    loaded(weights(), HostCache(tmp_path))
    assert True in outcomes and False in outcomes
    text, took = said
    assert "the CPU rebuilds tensors" in text and f"less than half of what was free on {DEVICE}" in text
    # Where the time of a start goes is said too, once.
    assert took.startswith("version 1: ") and len(re.findall(r"\d+[.]\d", took)) == 4, took


def test_a_model_that_is_quantised_as_it_loads_is_given_no_second_version(tmp_path):
    loader = pytest.importorskip("vllm_plugin.loader")
    with torch.device("meta"):
        layer = torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    norm = torch.nn.LayerNorm(4)
    assert loader.memory_of(norm) == loader.memory_of(torch.nn.Module()) == (torch.device("cpu"), 0)
    assert loader.memory_of(torch.nn.Sequential(layer, norm)) == (torch.device("cpu"), 32)
    current = weights()
    run, cache = of_two_versions(current), HostCache(tmp_path)
    leads_elsewhere = replace(run.plan(1), deltas=())
    # Of the first, `Run.reach` tries another way.
    for later_bytes, error in (0, StateMismatch), (32, LoadFailed):
        with pytest.raises(error, match="quantised" if later_bytes else None):
            list(loader.rebuilt(run, cache, leads_elsewhere, torch.device("cpu"), later_bytes))


def test_a_version_is_proved_also_where_a_loader_ends_early_what_it_is_given(tmp_path):
    loader = pytest.importorskip("vllm_plugin.loader")

    def proved(plan) -> None:
        with explained(run.schema, loader.rebuilt(run, cache, plan, torch.device("cpu"))) as given:

            def each():
                yield from given

            # What is left of this generator ends with it, and with that what it yields from.
            next(each())
            deque(given, maxlen=0)

    run, cache = of_two_versions(weights()), HostCache(tmp_path)
    proved(run.plan(1))
    with pytest.raises(StateMismatch):
        proved(replace(run.plan(1), deltas=()))
