"""Versions without payloads, for servers that read none."""

import json

from patchstore.bucket import history
from patchstore.bucket.records import (
    Adapter,
    Anchor,
    Manifest,
    Payload,
    Schema,
    StateDigest,
    StoreHeader,
    TensorSpec,
    Writer,
)
from patchstore.publish.commit import now
from patchstore.stores import layout
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore

DIGEST = f"blake3:{'0' * 64}"


def manifest(version: int, run_id: str = "run", created_at: str | None = None) -> Manifest:
    """A version with an empty anchor."""
    return Manifest(
        version=version,
        parent=version - 1 if version else None,
        parent_digest=DIGEST if version else None,
        run_id=run_id,
        step=version,
        created_at=created_at or now(),
        writer=Writer(id="test", epoch=1, write_id="w"),
        state=StateDigest(
            total=DIGEST, sums=Payload(key=layout.sums_key(version, "w"), size=0, digest=DIGEST)
        ),
        delta=None,
        anchor=Anchor(payloads=(), files=()),
    )


def commit(store: Store, version: int, run_id: str = "run", created_at: str | None = None) -> None:
    """Commit a version with an empty anchor."""
    history.commit(store, manifest(version, run_id, created_at))


def commit_at_no_time(store: Store, version: int, created_at: str) -> None:
    """Create a version as another writer might, with a time that `log.commit` refuses."""
    elsewhere = MemoryStore()
    commit(elsewhere, version)
    key = layout.manifest_key(version)
    store.put(key, json.dumps({**json.loads(elsewhere.get(key)), "created_at": created_at}).encode())


def begin_run(
    store: Store,
    run_id: str = "run",
    tensors: tuple[str, ...] = (),
    adapter: Adapter | None = None,
    shape: tuple[int, ...] = (2,),
) -> None:
    """Create a run, of no tensors or of some with these names."""
    schema = Schema(tensors=tuple(TensorSpec(name=name, dtype="BF16", shape=shape) for name in tensors))
    header = StoreHeader(run_id=run_id, created_at="2026-01-01T00:00:00.000Z", schema=schema, adapter=adapter)
    history.create_header(store, header)
