"""Delta files: for each tensor with changes its positions and values, or its coded tiles."""

import json
from collections.abc import Iterable, Mapping

import torch

from patchstore.encodings import EncodedTensor, IndexEncoding, encoding
from patchstore.encodings.context import Coded, Context, unpacked
from patchstore.errors import CorruptObject
from patchstore.format.json_fields import json_object
from patchstore.format.records import FORMAT_VERSION, Manifest, Part, TensorSpec
from patchstore.payloads.tensor_file import (
    aligned,
    check_metadata,
    is_listed_as,
    listed_spec,
    open_buffer,
)
from patchstore.tensors.bits import TensorPatch, spec_of

Stored = EncodedTensor | Coded
"""What a payload states of a tensor: some elements by position, or all changes of a part."""


def delta_metadata(
    version: int,
    parent: int,
    step: int,
    run_id: str,
    encoding: str,
    specs: Iterable[TensorSpec],
    firsts: Mapping[str, int],
) -> dict[str, str]:
    """The metadata of a delta's files: all that is needed to understand one on its own.

    Args:
        specs: of the tensors that are stated by positions and values.
        firsts: by name, from where the gaps of some of them count.
    """
    tensors = {
        spec.name: {"dtype": spec.dtype, "shape": list(spec.shape)}
        | ({"first": firsts[spec.name]} if spec.name in firsts else {})
        for spec in specs
    }
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
    patches: Iterable[tuple[Part, TensorPatch]], encoding: IndexEncoding
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Return the entries of a delta file for these patches, and from where the gaps of some of them count.

    Args:
        patches: of different tensors, by position in the tensor. Those of a whole tensor have the positions
            that the encoding asks for, see `IndexEncoding.with_bridges`.
    """
    stored: dict[str, torch.Tensor] = {}
    firsts: dict[str, int] = {}
    patches = list(patches)
    whole = iter(encoding.encode_all([(patch, part.spec) for part, patch in patches if part.is_whole]))
    for part, patch in patches:
        name = part.spec.name
        each = next(whole) if part.is_whole else encoding.encode_part(patch, part.spec)
        stored[f"{name}.idx"] = each.idx
        stored[f"{name}.val"] = each.val
        if each.first:
            firsts[name] = each.first
    return stored, firsts


def in_order(stored: Mapping[str, torch.Tensor]) -> tuple[list[TensorSpec], list[torch.Tensor]]:
    """Return entries in the order in which a file has them, and their specs."""
    specs = aligned(spec_of(name, tensor) for name, tensor in stored.items())
    return specs, [stored[spec.name] for spec in specs]


def read_delta(
    where: str, buffer: bytearray | memoryview, manifest: Manifest, schema: Mapping[str, TensorSpec]
) -> dict[str, tuple[Stored, ...]]:
    """Read a delta file and check that it is the one its manifest means.

    Args:
        schema: of the run, in its order.

    Returns:
        Per tensor name what is stored: any number of coded parts, and positions once at most.

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
    found: dict[str, tuple[Stored, ...]] = {}
    if isinstance(encoding(manifest.delta.encoding), Context):
        found |= unpacked(where, tensors, list(schema.values()))
    for name, value in listed.items():
        if name not in schema:
            raise CorruptObject(f"{where}: it changes tensor {name!r:.100}, which this run does not have")
        spec = schema[name]
        if not is_listed_as(spec, value) and listed_spec(where, name, value) != spec:
            raise CorruptObject(f"{where}: it takes {name!r} for {value!r:.100}, but the run has {spec}")
        idx, val = tensors.pop(f"{name}.idx", None), tensors.pop(f"{name}.val", None)
        if idx is None or val is None:
            raise CorruptObject(f"{where}: {name!r} lacks its positions or values")
        if not idx.numel():
            raise CorruptObject(f"{where}: it lists {name!r}, and states no element of it")
        stated = EncodedTensor(idx=idx, val=val, first=_first(where, spec, value))
        found[name] = (*found.get(name, ()), stated)
    if tensors:
        raise CorruptObject(f"{where}: it holds {min(tensors)!r:.100}, which belongs to no listed tensor")
    if not found:
        raise CorruptObject(f"{where}: it changes no tensor; a delta without changes has no payloads")
    return found


def _first(where: str, spec: TensorSpec, value: Mapping[str, object]) -> int:
    """Return the position from which a tensor's gaps count.

    Raises:
        CorruptObject
    """
    first = value.get("first", 0)
    if type(first) is not int or not 0 <= first < max(spec.num_elements, 1):
        raise CorruptObject(
            f"{where}: positions of {spec.name!r} count from {first!r:.100}, which is none of its "
            f"{spec.num_elements} elements"
        )
    return first
