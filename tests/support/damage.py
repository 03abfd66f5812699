"""Shortcuts that are damaged or forged, in each way that a reader or a compactor must notice."""

import json
from collections.abc import Callable

import torch

from patchstore.bucket import digests, shortcuts
from patchstore.bucket.records import Ends
from patchstore.codec import tensor_file
from patchstore.stores import layout
from patchstore.stores.base import Store

Damage = Callable[[Store, Ends], None]


def record_of(ends: Ends) -> str:
    return layout.shortcut_key(ends.version, ends.parent)


def payload_of(store: Store, ends: Ends) -> str:
    return shortcuts.read(store, ends).payloads[0].key


def edit_record(store: Store, ends: Ends, edit: Callable[[dict], None]) -> None:
    record = json.loads(store.get(record_of(ends)))
    edit(record)
    store.put(record_of(ends), json.dumps(record).encode())


def put_payload(store: Store, ends: Ends, data: bytes) -> None:
    """Replace a payload of a shortcut, and have the record name the new bytes, as a forger would."""
    store.put(payload_of(store, ends), data)

    def name(record: dict) -> None:
        part = record["anchor"] or record["delta"]
        part["payloads"][0] |= {"size": len(data), "digest": digests.digest(data)}

    edit_record(store, ends, name)


def flip(store: Store, ends: Ends) -> None:
    data = store.get(payload_of(store, ends))
    store.put(payload_of(store, ends), data[:-1] + bytes([data[-1] ^ 1]))


def truncate(store: Store, ends: Ends) -> None:
    store.put(payload_of(store, ends), store.get(payload_of(store, ends))[:-1])


def remove(store: Store, ends: Ends) -> None:
    store.delete(payload_of(store, ends))


def garble(store: Store, ends: Ends) -> None:
    store.put(record_of(ends), b"garbage")


def rename(store: Store, ends: Ends) -> None:
    """Have the record contain another manifest."""

    def other(record: dict) -> None:
        record["manifest"] = record["manifest"].replace('"step": ', '"step": 1')

    edit_record(store, ends, other)


def forge(store: Store, ends: Ends) -> None:
    """Other weights, in an object that is right in everything else."""
    data = bytearray(store.get(payload_of(store, ends)))
    if ends.parent is None:
        # The last bytes of an anchor are weights.
        data[-1] ^= 1
    else:
        found = tensor_file.open_buffer("", memoryview(data))[1]
        values = next(each for name, each in sorted(found.items()) if name.endswith(".val"))
        values.view(torch.uint8)[0] ^= 1
    put_payload(store, ends, bytes(data))
