"""Copies between host memory and a device arrive whole, whatever goes wrong beside them."""

import mmap
import os
import re
import signal
import threading
import time
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from patchstore.bucket.records import TensorSpec
from tests.support.interpreted import DEVICE
from vllm_plugin.live import copies
from vllm_plugin.live.copies import BLOCK_BYTES, PAGE_BYTES, Job, Lane, Piece, Transfers, batched, touch

MANY = 40
"""Jobs: more than threads have buffers."""


def numbers(num: int, dtype: torch.dtype = torch.int16) -> torch.Tensor:
    return torch.randint(-100, 100, (num,), dtype=dtype)


def test_what_is_written_can_be_read_again() -> None:
    step = BLOCK_BYTES // 2
    given = numbers(step * 6 + 77)
    held = torch.zeros_like(given, device=DEVICE)
    back = torch.zeros_like(given)
    transfers = Transfers(DEVICE)

    def write(part: torch.Tensor, target: torch.Tensor, lane: Lane) -> None:
        lane.write(part, target)

    def read(part: torch.Tensor, target: torch.Tensor, lane: Lane) -> None:
        lane.read(part, target)

    def compare(part: torch.Tensor, target: torch.Tensor, lane: Lane) -> None:
        assert torch.equal(lane.to_device(part), target)

    def each(first: torch.Tensor, second: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(torch.split(first, step), torch.split(second, step), strict=True))

    transfers.run(partial(write, *both) for both in each(given, held))
    assert torch.equal(held.cpu(), given)
    transfers.run(partial(read, *both) for both in each(held, back))
    assert torch.equal(back, given)
    transfers.run(partial(compare, *both) for both in each(given, held))


def test_parts_may_be_strided_on_both_sides() -> None:
    given = numbers(64 * 48, torch.int32).view(64, 48)
    held = torch.zeros(96, 64, dtype=torch.int32, device=DEVICE)
    target = held[::2].t()

    def write(row: int, lane: Lane) -> None:
        lane.write(given[row : row + 3], target[row : row + 3])

    Transfers(DEVICE).run(partial(write, row) for row in range(0, 64, 3))

    assert torch.equal(target.cpu(), given)
    assert not held[1::2].any()


def test_parts_of_what_lies_side_by_side_are_brought_at_once() -> None:
    given = numbers(BLOCK_BYTES // 2 * 3).view(torch.uint8)
    held = torch.zeros_like(given, device=DEVICE)

    def write(start: int, lane: Lane) -> None:
        some = given[start : start + BLOCK_BYTES]
        goal = held[start : start + BLOCK_BYTES]
        # Odd lengths at odd places, and a gap between them.
        lane.scatter(some, [(0, goal[:1001]), (1001, goal[1001:5000]), (6007, goal[6007:])])

    Transfers(DEVICE).run(partial(write, start) for start in range(0, len(given), BLOCK_BYTES))

    expected = given.clone().view(-1, BLOCK_BYTES)
    expected[:, 5000:6007] = 0
    assert torch.equal(held.cpu().view(-1, BLOCK_BYTES), expected)


def test_pieces_that_are_neighbours_on_both_sides_are_one_copy() -> None:
    given = numbers(600)
    spec = TensorSpec(name="w", dtype="I16", shape=(600,))
    held, other = torch.zeros(2, 600, dtype=torch.int16, device=DEVICE).clone().unbind()
    # The first two go side by side, the third further on, and the last before all others.
    goals = [held[100:200], held[200:300], held[301:401], held[:100], other[:50]]
    starts = [0, 100, 200, 300, 400]
    pieces = [
        Piece(spec, given[start : start + len(goal)], goal) for start, goal in zip(starts, goals, strict=True)
    ]

    [batch], others = batched(pieces)
    Lane().scatter(batch.given, batch.parts)

    assert [(at, len(target)) for at, target in batch.parts] == [(0, 400), (400, 200), (600, 200), (800, 100)]
    assert not others
    for piece in pieces:
        assert torch.equal(piece.held.cpu(), piece.given)
    assert int((held != 0).sum()) <= 400


def test_memory_that_lies_side_by_side_goes_to_a_block_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    given = numbers(BLOCK_BYTES // 2 * 3).view(torch.uint8).numpy()
    sizes = np.array([1000, 24, 0, BLOCK_BYTES + 1, 7, 512, 0, 65])
    # A gap on the one side, and then on the other.
    starts = sizes.cumsum() - sizes + np.array([8, 8, 8, 8, 64, 64, 64, 64])
    places = sizes.cumsum() - sizes + np.array([0, 0, 0, 0, 56, 100, 100, 100])
    block = torch.full((len(given),), 77, dtype=torch.uint8, device=DEVICE)
    transfers, jobs = Transfers(DEVICE), list[Job]()
    run = transfers.run
    monkeypatch.setattr(transfers, "run", lambda some: run(jobs.extend(some) or jobs))
    transfers.bring(given.ctypes.data + starts, sizes, block, places)
    expected = np.full_like(given, 77)
    for start, size, place in zip(starts, sizes, places, strict=True):
        expected[place : place + size] = given[start : start + size]
    assert np.array_equal(block.cpu().numpy(), expected)
    assert len(jobs) == 4


def test_nothing_to_do_takes_nothing() -> None:
    Transfers(DEVICE).run([])
    nothing = np.zeros(0, dtype=np.int64)
    Transfers(DEVICE).bring(nothing, nothing, torch.empty(0, dtype=torch.uint8, device=DEVICE), nothing)


def test_writes_wait_for_what_the_device_was_told_before() -> None:
    given = numbers(1000)
    held = torch.zeros(1000, dtype=torch.int16, device=DEVICE)
    if DEVICE.type == "cuda":
        # Some tens of milliseconds.
        large = torch.ones(8192, 8192, device=DEVICE)
        for _ in range(4):
            large = large @ large
    held.fill_(7)

    Transfers(DEVICE).run([lambda lane: lane.write(given, held)])

    assert torch.equal(held.cpu(), given)


def test_a_job_that_fails_ends_the_others_and_says_why() -> None:
    begun = count()

    def job(number: int, lane: Lane) -> None:
        next(begun)
        if number == 5:
            raise ValueError("the fifth")
        lane.to_device(numbers(BLOCK_BYTES // 2))

    transfers = Transfers(DEVICE)
    with pytest.raises(ValueError, match="the fifth"):
        transfers.run(partial(job, number) for number in range(1000))
    assert next(begun) < 1000

    # Nothing of it is left for the next time.
    held = torch.zeros(MANY, dtype=torch.int16, device=DEVICE)
    given = numbers(MANY)
    transfers.run(
        [partial(lambda at, lane: lane.write(given[at], held[at]), slice(k, k + 1)) for k in range(MANY)]
    )
    assert torch.equal(held.cpu(), given)


class Stream:
    """Stands for one of a GPU, where there is none."""

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> None: ...


def test_an_interrupt_ends_the_copies_before_it_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(copies, "new_stream", lambda device: Stream())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
        for name in ("device", "stream"):
            monkeypatch.setattr(torch.cuda, name, lambda given: nullcontext())
    done = count()

    def job(lane: Lane) -> None:
        time.sleep(0.01)
        next(done)

    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        Transfers(torch.device("cuda")).run(job for _ in range(1000))
    seen = next(done)
    time.sleep(0.2)
    assert next(done) == seen + 1 < 1000


def resident_bytes(path: Path) -> int:
    """Of a file that this process has mapped once, what has a page in its memory."""
    _, _, its = Path("/proc/self/smaps").read_text().partition(str(path))
    rss = re.search(r"^Rss: +(\d+) kB$", its, re.MULTILINE)
    assert rss is not None
    return 1024 * int(rss[1])


def test_what_is_touched_is_mapped_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * PAGE_BYTES * 64))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
        numbers = torch.frombuffer(memory, dtype=torch.int16)
        parts = [part.view(torch.bfloat16) for part in torch.split(numbers, 10_001)]
        before = resident_bytes(path)
        Transfers(DEVICE).run(touch([*parts[:-1], torch.zeros(0), parts[-1]]))
        assert before < len(memory) == resident_bytes(path)
        strided = numbers.view(512, -1).t()[3:]
        Transfers(DEVICE).run(touch([strided, torch.tensor(1.0)]))
        del numbers, parts, strided
