"""A count, a length or a shape that a payload states makes no reader of a small model take much memory."""

import copy
import json
import os
import resource
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from patchstore.apply.replica import Replica
from patchstore.errors import DataError
from tests.format import surgery
from tests.format.independent_context import COLUMNS
from tests.format.surgery import Objects
from tests.format.table_edits import Head

GOLDEN = Path(__file__).parents[1] / "golden"
BUCKETS = ("v1-raw", "v1-gap", "v1-context", "v1-parts")
STATED = (0, -1, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**48, 2**53, 2**63 - 1, 2**63)
ROOM_BYTES = 300_000_000
"""What a reader may take beyond what the process has: the buckets have some kilobytes."""

Edit = Callable[[bytes], bytes]


def header_edits(data: bytes) -> Iterator[tuple[str, bytes]]:
    """A safetensors file with another number in its header, everywhere that there is one."""
    for stated in STATED:
        yield f"length of the header {stated}", struct.pack("<Q", stated % 2**64) + data[8:]
    header, rest = surgery.take_apart(data)
    for name in header.keys() - {"__metadata__"}:
        for field, at in (("shape", 0), ("data_offsets", 0), ("data_offsets", 1)):
            if len(header[name][field]) <= at:
                continue
            for stated in STATED:
                changed = copy.deepcopy(header)
                changed[name][field][at] = stated
                yield f"{name}.{field}[{at}] {stated}", surgery.put_together(changed, rest)
    listed = json.loads(header["__metadata__"].get("tensors", "{}"))
    for name in listed:
        for stated in STATED:
            for field, value in (("shape", [stated]), ("first", stated)):
                changed, told = copy.deepcopy(header), copy.deepcopy(listed)
                told[name][field] = value
                changed["__metadata__"]["tensors"] = json.dumps(told)
                yield f"{name}.{field} {stated}", surgery.put_together(changed, rest)


def table_edits(data: bytes) -> Iterator[tuple[str, bytes]]:
    """A file of coded parts with another number in its table; and heads that a few bytes make large."""
    metadata, tensors = surgery.entries(data)
    if "table" not in tensors:
        return
    table = tensors["table"][2]

    def with_table(edited: bytes) -> bytes:
        return surgery.tensor_file(metadata, {**tensors, "table": ("U8", [len(edited)], edited)})

    for at in (0, 4, 8):
        for stated in STATED:
            number = struct.pack("<I", stated % 2**32)
            yield f"front {at}: {stated}", with_table(table[:at] + number + table[at + 4 :])
    for column, size in COLUMNS.items():
        for stated in STATED:
            head = Head(table)
            head.columns[column][-1] = stated % 2 ** (8 * size)
            yield f"{column} {stated}", with_table(head.table())
    for num_parts in (3_000, 5_000_000):
        head_bytes = zlib.compress(bytes(num_parts * sum(COLUMNS.values())) + bytes([0x7F, 1, 0, 0, 0]), 1)
        front = struct.pack("<III", num_parts, 1, len(head_bytes))
        yield f"{num_parts} parts of zeros", with_table(front + head_bytes)
        yield f"{num_parts} parts of less", with_table(front + zlib.compress(bytes(9)) + head_bytes[8:])


def cases(bucket: str) -> Iterator[tuple[str, Objects]]:
    objects = surgery.load(GOLDEN / bucket)
    for version, part in ((0, "anchor"), (1, "delta")):
        data = surgery.payload(objects, version, part)
        for edits in (header_edits, table_edits):
            for name, edited in edits(data):
                changed = dict(objects)
                surgery.put_payload(changed, version, part, edited)
                yield f"{part}: {name}", changed


def main(bucket: str) -> None:
    """Read a bucket with each number changed, in a process that can take little memory."""
    every = list(cases(bucket))
    # What the process needs anyway is there by now.
    Replica(surgery.store_of(surgery.load(GOLDEN / bucket)), dict[str, Any]()).update(1)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    num_refused = 0
    for name, objects in every:
        try:
            Replica(surgery.store_of(objects), dict[str, Any]()).update(1)
        except DataError:
            num_refused += 1
        except BaseException:
            sys.stdout.write(f"{bucket}: {name}")
            raise
    sys.stdout.write(f"{len(every)} {num_refused}")


@pytest.mark.parametrize("bucket", BUCKETS)
def test_no_stated_number_makes_a_reader_take_memory(bucket: str) -> None:
    command = [sys.executable, "-c", f"from tests.format.test_hostile_counts import main; main({bucket!r})"]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, **threads},
        cwd=GOLDEN.parents[1],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    num_cases, num_refused = map(int, done.stdout.split())
    assert num_cases > 100
    assert num_refused > 0.7 * num_cases
