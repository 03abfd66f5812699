"""The golden buckets, what is expected of them, and changed copies."""

import hashlib
import json
from pathlib import Path
from typing import Any

from patchstore.read import replay
from patchstore.stores.memory import MemoryStore
from tests.format import bucket_edits, independent_reader, surgery

GOLDEN = Path(__file__).parents[1] / "golden"
EXPECTED: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_bytes())


class PatientStore(MemoryStore):
    """Refuses to be asked for ever."""

    def __init__(self, objects: surgery.Objects) -> None:
        super().__init__()
        for key, data in objects.items():
            self.put(key, data)
        self.patience = 200

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.patience -= 1
        assert self.patience > 0, "a bucket of some ten objects was asked for 200 pieces"
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
