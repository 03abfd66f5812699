"""Delta files: for each tensor with changes its positions and values, or its coded tiles."""

import json
from collections.abc import Iterable, Mapping

import torch

from patchstore.encodings import EncodedTensor, IndexEncoding, encoding
from patchstore.encodings.context import Coded, Context, unpacked
from patchstore.errors import CorruptObject
from patchstore.format.json_fields import json_object
from patchstore.format.records import FORMAT_VERSION, Manifest, TensorSpec
from patchstore.payloads.tensor_file import aligned, check_metadata, listed_spec, open_buffer
from patchstore.tensors.bits import TensorPatch, spec_of


def delta_metadata(
    version: int, parent: int, step: int, run_id: str, encoding: str, specs: Iterable[TensorSpec]
) -> dict[str, str]:
    """The metadata of a delta's files: all that is needed to understand one on its own."""
    tensors = {spec.name: {"dtype": spec.dtype, "shape": list(spec.shape)} for spec in specs}
    return {
        "format": "patchstore",
        "format_version": str(FORMAT_VERSION),
        "kind": "delta",
        "run_id": run_id,
        "version": str(version),
        "parent": str(parent),
        "step": str(step),
        "encoding": encoding,
        "tensors": json.dumps(tensors, separators=(",", ":"), ensure_ascii=False),
    }


def encoded(
    patches: Iterable[tuple[TensorSpec, TensorPatch]], encoding: IndexEncoding
) -> dict[str, torch.Tensor]:
    """Return the entries of a delta file for these patches."""
    stored: dict[str, torch.Tensor] = {}
    for spec, patch in patches:
        each = encoding.encode(patch, spec)
        stored[f"{spec.name}.idx"] = each.idx
        stored[f"{spec.name}.val"] = each.val
    return stored


def in_order(stored: Mapping[str, torch.Tensor]) -> tuple[list[TensorSpec], list[torch.Tensor]]:
    """Return entries in the order in which a file has them, and their specs."""
    specs = aligned(spec_of(name, tensor) for name, tensor in stored.items())
    return specs, [stored[spec.name] for spec in specs]


def read_delta(
    where: str, buffer: bytearray | memoryview, manifest: Manifest, schema: Mapping[str, TensorSpec]
) -> dict[str, EncodedTensor | Coded]:
    """Read a delta file and check that it is the one its manifest means.

    Args:
        schema: of the run, in its order.

    Returns:
        Per tensor name what is stored.

    Raises:
        CorruptObject: not a delta, or one of another run, version, parent or encoding; a tensor that
            the run does not have, or has in another shape or dtype; entries missing, empty or left over.
    """
    header, tensors = open_buffer(where, buffer)
    assert manifest.delta is not None
    expected = {
        "format": "patchstore",
        "format_version": str(FORMAT_VERSION),
        "kind": "delta",
        "run_id": manifest.run_id,
        "version": str(manifest.version),
        "parent": str(manifest.parent),
        "step": str(manifest.step),
        "encoding": manifest.delta.encoding,
    }
    check_metadata(where, header, expected)
    listed = json_object(f"{where}: its list of tensors", header.metadata.get("tensors", ""))
    found: dict[str, EncodedTensor | Coded] = {}
    if isinstance(encoding(manifest.delta.encoding), Context):
        found |= unpacked(where, tensors, list(schema.values()))
    for name, value in listed.items():
        if name in found:
            raise CorruptObject(f"{where}: it has {name!r:.100} twice")
        if name not in schema:
            raise CorruptObject(f"{where}: it changes tensor {name!r:.100}, which this run does not have")
        if listed_spec(where, name, value) != schema[name]:
            raise CorruptObject(
                f"{where}: it takes {name!r} for {value!r:.100}, but the run has {schema[name]}"
            )
        if f"{name}.idx" not in tensors or f"{name}.val" not in tensors:
            raise CorruptObject(f"{where}: {name!r} lacks its positions or values")
        idx, val = tensors.pop(f"{name}.idx"), tensors.pop(f"{name}.val")
        if not idx.numel():
            raise CorruptObject(f"{where}: it lists {name!r}, and states no element of it")
        found[name] = EncodedTensor(idx=idx, val=val)
    if tensors:
        raise CorruptObject(f"{where}: it holds {min(tensors)!r:.100}, which belongs to no listed tensor")
    if not found:
        raise CorruptObject(f"{where}: it changes no tensor; a delta without changes has no payloads")
    return found
