"""The golden buckets, what is expected of them, and changed copies."""

import hashlib
import json
from pathlib import Path
from typing import Any

from patchstore.apply.replica import Replica
from patchstore.read import replay
from patchstore.stores.memory import MemoryStore
from patchstore.tensors.bits import raw_bytes
from tests.format import bucket_edits, independent_reader, surgery

GOLDEN = Path(__file__).parents[1] / "golden"
EXPECTED: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_bytes())


class PatientStore(MemoryStore):
    """Refuses to be asked for ever."""

    def __init__(self, objects: surgery.Objects) -> None:
        super().__init__()
        for key, data in objects.items():
            self.put(key, data)
        self.patience = 300

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.patience -= 1
        assert self.patience > 0, "a bucket of some ten objects was asked for 300 pieces"
        return super().get(key, start, end)


def sha256(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def spoiled(case: bucket_edits.Bad) -> surgery.Objects:
    objects = surgery.load(GOLDEN / case.bucket)
    case.change(objects)
    return objects


def assert_both_verify(objects: surgery.Objects, version: int, folder: Path) -> None:
    assert replay.verify(surgery.store_of(objects), version).version == version
    independent_reader.verify(surgery.lay_out(objects, folder), version)


def assert_expected(follower: Replica, bucket: str, version: int) -> None:
    """Fail unless a follower has the weights that a version of a golden bucket had."""
    expected = EXPECTED[bucket][str(version)]["tensors"]
    found = {name: sha256(raw_bytes(tensor)) for name, tensor in follower.tensors.items()}
    assert found == {name: tensor["sha256"] for name, tensor in expected.items()}
