"""What tests of mirrors look at."""

import threading
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from patchstore.errors import ConsumerFailed
from patchstore.mirror.consumers import Consumer
from patchstore.mirror.service import Mirror


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint folder, as another library reads them."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def step(mirror: Mirror) -> list[tuple[str, int | None]]:
    return [(event.outcome, event.version) for event in mirror.work()]


class Recording(Consumer):
    """Remembers what it was told, and refuses as often as told."""

    name = "recording"

    def __init__(self, refuse: int = 0) -> None:
        self.told: list[dict[str, str]] = []
        self.refuse = refuse

    def tell(self, values: Mapping[str, str], stop: threading.Event) -> None:
        if self.refuse:
            self.refuse -= 1
            raise ConsumerFailed("refused")
        self.told.append(dict(values))
