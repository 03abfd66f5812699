"""What several payloads, or several parts, state of one tensor of one version: no element twice."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from patchstore.encodings import EncodedTensor, IndexEncoding
from patchstore.encodings.context import Coded
from patchstore.errors import CorruptObject
from patchstore.format.records import Box, TensorSpec
from patchstore.payloads.delta_file import Stored
from patchstore.tensors.bits import TensorPatch

Parts = tuple[tuple[str, Stored], ...]
"""What one version states of one tensor: the key of a payload, and what that has."""


def check_boxes(version: int, spec: TensorSpec, parts: Parts) -> None:
    """Refuse coded parts of a tensor that have elements in common.

    Raises:
        CorruptObject
    """
    coded = [(key, each.tiling.box) for key, each in parts if isinstance(each, Coded)]
    if len(coded) < 2:
        return
    pair = _overlapping([box for _, box in coded])
    if pair is not None:
        raise CorruptObject(
            f"{coded[pair[1]][0]}: it codes elements of {spec.name!r} that {coded[pair[0]][0]} codes too, in "
            f"version {version}"
        )


def check_listed(version: int, spec: TensorSpec, parts: Parts, encoding: IndexEncoding) -> None:
    """Decode what is listed of a tensor, and `check_patches`, unless no two parts can have one element.

    Raises:
        CorruptObject: see there; or positions that no encoder writes.
    """
    listed = [(key, each) for key, each in parts if isinstance(each, EncodedTensor)]
    if not listed or len(parts) == 1:
        return
    if len(listed) == len(parts) and all(each.idx.dtype == torch.uint16 for _, each in listed):
        # Where gaps begin and end is known without listing positions.
        nums = [len(each.idx) for _, each in listed]
        sums = [int(each.idx.to(torch.int64).sum()) for _, each in listed]
        begins = [each.first + (int(each.idx[0]) if len(each.idx) else 0) for _, each in listed]
        ends = [each.first + total + num for (_, each), total, num in zip(listed, sums, nums, strict=True)]
        ranges = sorted(zip(begins, ends, strict=True))
        if all(end <= begin for (_, end), (begin, _) in pairwise(ranges)):
            return
    check_patches(version, spec, parts, [(key, encoding.decode(each, spec, key)) for key, each in listed])


def check_patches(
    version: int, spec: TensorSpec, parts: Parts, patches: Sequence[tuple[str, TensorPatch]]
) -> None:
    """Refuse elements that two payloads list, or that one lists and any of them codes.

    Args:
        patches: what is listed, and the key of its payload.

    Raises:
        CorruptObject
    """
    boxes = [each.tiling for _, each in parts if isinstance(each, Coded)]
    for key, patch in patches if boxes else ():
        at = patch.indices.numpy().astype(np.int64)
        line, col = np.divmod(at, boxes[0].cols)
        level, row = np.divmod(line, boxes[0].rows)
        for box in (each.box for each in boxes):
            inside = (level >= box.level) & (level < box.level + box.levels)
            inside &= (row >= box.row) & (row < box.row + box.rows)
            inside &= (col >= box.col) & (col < box.col + box.cols)
            if inside.any():
                raise CorruptObject(
                    f"{key}: it lists an element of {spec.name!r} that a payload of version {version} codes"
                )
    if len(patches) < 2:
        return
    ranges = sorted((int(patch.indices[0]), int(patch.indices[-1])) for _, patch in patches)
    if all(end < begin for (_, end), (begin, _) in pairwise(ranges)):
        return
    every = torch.cat([patch.indices.to(torch.int64) for _, patch in patches])
    if len(torch.unique(every)) < len(every):
        raise CorruptObject(
            f"{patches[-1][0]}: it states an element of {spec.name!r} that another payload of version "
            f"{version} states too"
        )


def _overlapping(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Return two boxes that have elements in common, if any have."""
    starts = np.array([(box.level, box.row, box.col) for box in boxes])
    ends = starts + np.array([(box.levels, box.rows, box.cols) for box in boxes])
    # Most trainers cut one dimension: then neighbours along it tell.
    differ = [
        dim for dim in range(3) if len(np.unique(np.stack([starts[:, dim], ends[:, dim]], 1), axis=0)) > 1
    ]
    if len(differ) <= 1:
        dim = differ[0] if differ else 0
        order = np.argsort(starts[:, dim], kind="stable")
        near = np.flatnonzero(starts[order[1:], dim] < ends[order[:-1], dim])
        return (int(order[near[0]]), int(order[near[0] + 1])) if len(near) else None
    for number in range(1, len(boxes)):
        common = (starts[:number] < ends[number]) & (starts[number] < ends[:number])
        found = np.flatnonzero(common.all(axis=1))
        if len(found):
            return int(found[0]), number
    return None
