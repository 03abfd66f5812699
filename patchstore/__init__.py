"""patchstore: publish what an optimiser step changed, and serve exactly that.

Names are loaded when they are first used, so that reading a bucket's log does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patchstore.errors import PatchstoreError
    from patchstore.follower import Follower
    from patchstore.model import Manifest, Payload, Plan, Schema, TensorSpec
    from patchstore.publisher import Publication, Publisher
    from patchstore.rebuild import replay, verify
    from patchstore.stores import Store, open_store

__version__ = "0.1.0"

_HOMES = {
    "Follower": "patchstore.follower",
    "Manifest": "patchstore.model",
    "PatchstoreError": "patchstore.errors",
    "Payload": "patchstore.model",
    "Plan": "patchstore.model",
    "Publication": "patchstore.publisher",
    "Publisher": "patchstore.publisher",
    "Schema": "patchstore.model",
    "Store": "patchstore.stores",
    "TensorSpec": "patchstore.model",
    "open_store": "patchstore.stores",
    "replay": "patchstore.rebuild",
    "verify": "patchstore.rebuild",
}

__all__ = [
    "Follower",
    "Manifest",
    "PatchstoreError",
    "Payload",
    "Plan",
    "Publication",
    "Publisher",
    "Schema",
    "Store",
    "TensorSpec",
    "open_store",
    "replay",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'patchstore' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
