"""An extension whose server is killed, with all its processes, when its worker has half of an anchor."""

import os
import signal
from pathlib import Path

from patchstore.bucket.records import Payload
from patchstore.read import host_cache
from patchstore.stores.base import Store
from vllm_plugin import DeltaWorkerExtension


class KilledExtension(DeltaWorkerExtension):
    """Changes nothing else."""


def _killed(store: Store, wanted: Payload, path: Path) -> None:
    if wanted.key.startswith("anchors/"):
        path.write_bytes(b"".join(store.read(wanted.key, end=wanted.size // 2)))
        os.killpg(0, signal.SIGKILL)
    _download(store, wanted, path)


_download, host_cache.download = host_cache.download, _killed
