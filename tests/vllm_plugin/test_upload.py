"""What is brought to a device is there as it was, wherever it lay."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch

from patchstore.bucket.records import Schema, TensorSpec
from patchstore.kernels import pinned
from tests.support.interpreted import DEVICE, kernels
from tests.support.stated import listed
from vllm_plugin.gpu import upload
from vllm_plugin.gpu.upload import send, send_memory, tables_on


def test_memory_arrives_with_its_elements_aligned() -> None:
    data = np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8)
    origin = data.ctypes.data
    # Neighbours, the same bytes twice, some that overlap, nothing, and others far away; in no order.
    starts = np.array([3000, 8, 24, 24, 30, 500, 40, 90, 1023])
    sizes = np.array([999, 16, 6, 6, 10, 0, 33, 410, 64])
    block, places = send_memory(origin + starts, sizes, DEVICE)
    assert (block.device.type, block.dtype) == (DEVICE.type, torch.uint8)
    assert ((places - origin - starts) % 8 == 0).all()
    assert len(block) < len(data)
    for start, size, place in zip(starts, sizes, places, strict=True):
        found = block[place : place + size].cpu().numpy()
        assert np.array_equal(found, data[start : start + size])


@pytest.mark.parametrize("room", [64, 1 << 12])
def test_pinned_memory_goes_as_it_is_between_other_memory(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    data = np.random.default_rng(1).integers(0, 256, 8192, dtype=np.uint8)
    # Parts in ascending order; one of three is pinned, as it may lie between, before or behind others.
    starts, sizes = np.arange(0, 8000, 200), np.tile([200, 130, 1, 64], 10)
    if torch.cuda.is_available():
        held = pinned(len(data), DEVICE)
        held.numpy()[:] = data
        addresses = np.where(np.arange(40) % 3 == 1, held.data_ptr(), data.ctypes.data) + starts
    else:
        addresses = data.ctypes.data + starts
        # The first byte and the last of each.
        chosen = {*addresses[1::3].tolist(), *(addresses + sizes - 1)[1::3].tolist()}
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda part: part.data_ptr() in chosen)
        for name in ("Event", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: Mock())
    monkeypatch.setattr(upload, "UPLOAD", room)
    block = torch.zeros(16384, dtype=torch.uint8, device=DEVICE)
    sending = upload.Upload(block)
    places = starts * 2
    for address, size, place in zip(addresses.tolist(), sizes.tolist(), places.tolist(), strict=True):
        sending.add(upload.memory_of(address, size), place)
    sending.finish()
    for start, size, place in zip(starts, sizes, places, strict=True):
        assert np.array_equal(block[place : place + size].cpu().numpy(), data[start : start + size])


def test_nothing_takes_no_memory() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    block, places = send_memory(nothing, nothing, DEVICE)
    assert (len(block), len(places)) == (0, 0)
    block, _ = send_memory(np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.int64), DEVICE)
    assert len(block) == 0


def test_tables_of_any_length_are_aligned() -> None:
    tables = [
        np.arange(3, dtype=np.int64),
        np.zeros((0, 2), dtype=np.int32),
        np.arange(14, dtype=np.int32).reshape(7, 2)[::-1],
        np.arange(12, dtype=np.int64).reshape(3, 4).T,
    ]
    found = tables_on(DEVICE, *tables)
    assert all(each.data_ptr() % 16 == 0 for each in found)
    for each, table in zip(found, tables, strict=True):
        assert each.cpu().numpy().dtype == table.dtype
        assert np.array_equal(each.cpu().numpy(), table)
    assert tables_on(DEVICE) == []


def test_lists_at_odd_addresses_are_brought_to_even_ones() -> None:
    buffer = bytearray(64)
    given = listed(
        torch.frombuffer(buffer, dtype=torch.uint16, count=3, offset=1),
        torch.frombuffer(buffer, dtype=torch.float32, count=3, offset=9),
    )
    given.idx.copy_(torch.tensor([2, 0, 4], dtype=torch.uint16))
    given.val.copy_(torch.tensor([1.0, 2.0, 3.0]))
    schema = Schema(tensors=(TensorSpec(name="a", dtype="F32", shape=(20,)),))
    gaps = kernels("vllm_plugin.gpu.decode").send_gaps([given], schema, DEVICE)
    assert (gaps.patches.positions % 2 == 0).all()
    assert (gaps.patches.values % 4 == 0).all()
    assert gaps.values(torch.int32).view(torch.float32).tolist() == [1.0, 2.0, 3.0]


def test_positions_and_values_at_odd_addresses_are_brought_to_even_ones() -> None:
    buffer = bytearray(64)
    given = [
        torch.frombuffer(buffer, dtype=torch.int32, count=3, offset=2),
        torch.frombuffer(buffer, dtype=torch.int16, count=3, offset=17),
        torch.frombuffer(buffer, dtype=torch.uint8, count=3, offset=31),
    ]
    for each in given:
        each.copy_(torch.tensor([5, 7, 9]))
    sent = send(given, DEVICE)
    assert [each.data_ptr() % each.element_size() for each in sent] == [0, 0, 0]
    assert [each.dtype for each in sent] == [each.dtype for each in given]
    assert all(each.tolist() == [5, 7, 9] for each in sent)
