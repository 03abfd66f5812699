"""patchstore: publish what an optimiser step changed, and serve exactly that.

Names are loaded when they are first used, so that reading a bucket's log does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from patchstore import errors

if TYPE_CHECKING:
    from patchstore.apply.replica import Replica
    from patchstore.bucket.records import Manifest, Payload, Plan, Schema, TensorSpec
    from patchstore.errors import PatchstoreError
    from patchstore.follow.wait import wait_until
    from patchstore.publish.publisher import Publication, Publisher
    from patchstore.publish.sources import (
        LocalPart,
        PeftAdapter,
        as_saved,
        interleaved_qkv,
        joined_gate_up,
        mapped,
        without_padding,
    )
    from patchstore.read.diff import Diff, TensorDiff
    from patchstore.read.replay import replay, verify
    from patchstore.read.run import Run, open  # noqa: A004 -- `patchstore.open`
    from patchstore.read.versions import Version
    from patchstore.stores import Store, open_store

__version__ = "0.1.0"

_HOMES = {
    "Diff": "patchstore.read.diff",
    "LocalPart": "patchstore.publish.sources",
    "Replica": "patchstore.apply.replica",
    "Manifest": "patchstore.bucket.records",
    "PatchstoreError": "patchstore.errors",
    "PeftAdapter": "patchstore.publish.sources",
    "Payload": "patchstore.bucket.records",
    "Plan": "patchstore.bucket.records",
    "Publication": "patchstore.publish.publisher",
    "Publisher": "patchstore.publish.publisher",
    "Run": "patchstore.read.run",
    "Schema": "patchstore.bucket.records",
    "Store": "patchstore.stores",
    "TensorDiff": "patchstore.read.diff",
    "TensorSpec": "patchstore.bucket.records",
    "Version": "patchstore.read.versions",
    "as_saved": "patchstore.publish.sources",
    "interleaved_qkv": "patchstore.publish.sources",
    "joined_gate_up": "patchstore.publish.sources",
    "mapped": "patchstore.publish.sources",
    "open": "patchstore.read.run",
    "open_store": "patchstore.stores",
    "replay": "patchstore.read.replay",
    "verify": "patchstore.read.replay",
    "wait_until": "patchstore.follow.wait",
    "without_padding": "patchstore.publish.sources",
}

__all__ = [
    "Diff",
    "Replica",
    "LocalPart",
    "Manifest",
    "PatchstoreError",
    "Payload",
    "PeftAdapter",
    "Plan",
    "Publication",
    "Publisher",
    "Run",
    "Schema",
    "Store",
    "TensorDiff",
    "TensorSpec",
    "Version",
    "as_saved",
    "errors",
    "interleaved_qkv",
    "joined_gate_up",
    "mapped",
    "open",
    "open_store",
    "replay",
    "verify",
    "wait_until",
    "without_padding",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'patchstore' has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as exc:
        if exc.name == "torch":
            import_module("patchstore.tensors")  # raises, and says what to install
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
