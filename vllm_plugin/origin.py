"""Find out which version a server holds when it starts, from the checkpoint folder it loaded.

An anchor is an ordinary checkpoint folder, so servers are started from one, or from the base model
that was published as version 0. Names and times prove nothing; the bits do.
"""

import json
import mmap
from collections.abc import Iterator
from pathlib import Path

import torch

from patchstore import digest, log, payload
from patchstore.errors import VersionNotFound
from patchstore.model import Manifest, Schema
from patchstore.stores.base import Store
from patchstore.tensors import spec_of


def read_folder(folder: Path, schema: Schema) -> dict[str, torch.Tensor]:
    """Return the schema's tensors from a checkpoint folder, or nothing if it lacks one of them.

    Tensors that the schema does not know are left out: they are not the trainer's.

    Raises:
        CorruptObject: a file is not a safetensors file.
    """
    wanted = schema.by_name()
    found: dict[str, torch.Tensor] = {}
    for path in _files(folder):
        if path.stat().st_size == 0:
            continue
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        # Unmapped with the last tensor over it.
        _, tensors = payload.open_buffer(path.name, memoryview(mapped))
        for name, tensor in tensors.items():
            if wanted.get(name) == spec_of(name, tensor):
                # A copy: undoing relies on it, and the file may be replaced while the server runs.
                found[name] = tensor.clone()
    return found if found.keys() == wanted.keys() else {}


def _files(folder: Path) -> list[Path]:
    """The files that make up the checkpoint; folders may hold further copies in other layouts."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        return [folder / name for name in sorted(names)]
    single = folder / "model.safetensors"
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


def find_version(store: Store, schema: Schema, tensors: dict[str, torch.Tensor]) -> int | None:
    """Return the version whose state these tensors have, or None.

    Looks from the head back for as long as the deltas from there cost less than the nearest anchor:
    knowing an older version would not make the next update cheaper. Each tensor is digested at most
    once, and only until a candidate differs.
    """
    sums: dict[str, str] = {}
    names = [spec.name for spec in sorted(schema.tensors, key=lambda spec: spec.num_elements)]
    for manifest in _worth_knowing(store):
        recorded = dict(zip((spec.name for spec in schema.tensors), manifest.state.tensors, strict=False))
        for name in names:
            if name not in sums:
                sums[name] = digest.of_tensor(tensors[name]).hex()
            if sums[name] != recorded[name]:
                break
        else:
            return manifest.version
    return None


def _worth_knowing(store: Store) -> Iterator[Manifest]:
    manifest = log.head(store)
    spent, anchor = 0, None
    while manifest is not None:
        yield manifest
        if anchor is None and manifest.anchor is not None:
            anchor = spent + manifest.anchor.num_bytes
        if manifest.delta is None or manifest.parent is None:
            return
        spent += manifest.delta.num_bytes
        if anchor is not None and spent > anchor:
            return
        try:
            manifest = log.read_manifest(store, manifest.parent)
        except VersionNotFound:
            return
