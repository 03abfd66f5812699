"""A bucket to mirror, and mirrors of it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from patchstore.ops.mirror.place import Place
from patchstore.ops.mirror.service import Mirror
from patchstore.stores.memory import MemoryStore
from tests.support.commands import patchstore, started  # noqa: F401 -- fixtures
from tests.support.weights import Run


@pytest.fixture
def run(store: MemoryStore, tmp_path: Path) -> Iterator[Run]:
    """A run whose anchors have a config, and weights in several files; not yet begun."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "made up"}')
    run = Run(store)
    run.open(files=base, max_shard_bytes=20_000)
    yield run
    run.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "mirror"


@pytest.fixture
def mirrored(store: MemoryStore, folder: Path) -> Iterator[Callable[..., Mirror]]:
    """Opens mirrors of the folder; another one after the first is closed stands for another process."""
    places: list[Place] = []

    def open_(**options: object) -> Mirror:
        for each in places:
            each.close()
        places.append(Place(folder))
        return Mirror(**{"store": store, "place": places[-1], **options})  # type: ignore[arg-type]

    yield open_
    for each in places:
        each.close()
